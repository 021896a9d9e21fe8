//! Freezing file systems until the checkpoint is accepted.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::program::error::Error;
use crate::program::sys;
use crate::program::watchdog::Watchdog;

/// The file systems of one checkpoint. They are opened, and the watchdog runs, before the first
/// freeze.
///
/// Between [`freeze`](Freezer::freeze) and [`thaw`](Freezer::thaw) the caller must not print or
/// open anything: the file could be on a frozen file system.
#[derive(Debug)]
pub(crate) struct Freezer {
    paths: Vec<PathBuf>,
    mounts: Vec<File>,
    /// `None` if there is nothing to freeze, and after the thaw.
    watchdog: Option<Watchdog>,
    frozen: usize,
}

impl Freezer {
    /// Opens `paths` and starts the watchdog, which ends the freeze after `limit`.
    pub(crate) fn prepare(paths: &[PathBuf], limit: Duration) -> Result<Freezer, Error> {
        let mounts = open_all(paths)?;
        let watchdog = if mounts.is_empty() {
            None
        } else {
            sys::lock_memory().map_err(Error::Watchdog)?;
            Some(Watchdog::start(&mounts, limit).map_err(Error::Watchdog)?)
        };
        Ok(Freezer { paths: paths.to_vec(), mounts, watchdog, frozen: 0 })
    }

    /// Flushes the file systems, so that the freeze itself has little to write.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        for (mount, path) in self.mounts.iter().zip(&self.paths) {
            sys::sync_filesystem(mount.as_fd())
                .map_err(|source| Error::Freeze { mount: path.clone(), source })?;
        }
        Ok(())
    }

    /// Freezes all file systems in the given order, or none.
    pub(crate) fn freeze(&mut self) -> Result<(), Error> {
        let outcome = self.freeze_each();
        if outcome.is_err() {
            // The reason of the failed freeze is more useful than a failure to undo it. The
            // watchdog thaws what this call cannot.
            let _ = self.thaw();
        }
        outcome
    }

    fn freeze_each(&mut self) -> Result<(), Error> {
        let Some(watchdog) = &mut self.watchdog else { return Ok(()) };
        for (mount, path) in self.mounts.iter().zip(&self.paths) {
            watchdog.freezing().map_err(Error::Watchdog)?;
            if let Err(source) = sys::freeze(mount.as_fd()) {
                watchdog.not_frozen().map_err(Error::Watchdog)?;
                return Err(match source.raw_os_error() {
                    Some(libc::EBUSY) => Error::AlreadyFrozen(path.clone()),
                    _ => Error::Freeze { mount: path.clone(), source },
                });
            }
            self.frozen += 1;
        }
        Ok(())
    }

    /// Thaws everything that is frozen, in the reverse order, and stops the watchdog.
    ///
    /// Returns the first error, and thaws the other file systems in spite of it.
    pub(crate) fn thaw(&mut self) -> Result<(), Error> {
        let mut outcome = Ok(());
        let mut stuck = false;
        for (mount, path) in self.mounts.iter().zip(&self.paths).take(self.frozen).rev() {
            let Err(source) = sys::thaw(mount.as_fd()) else { continue };
            let error = if source.raw_os_error() == Some(libc::EINVAL) {
                Error::ThawedEarly(path.clone())
            } else {
                stuck = true;
                Error::Thaw { mount: path.clone(), source }
            };
            outcome = outcome.and(Err(error));
        }
        self.frozen = 0;
        let watchdog = self.watchdog.take();
        // Without the message "thawed" the watchdog tries again when its socket closes.
        if let (Some(watchdog), false) = (watchdog, stuck) {
            // The watchdog may have ended. There is nothing left for it to do.
            let _ = watchdog.thawed();
        }
        outcome
    }
}

fn open_all(paths: &[PathBuf]) -> Result<Vec<File>, Error> {
    let mut mounts = Vec::with_capacity(paths.len());
    let mut devices: Vec<u64> = Vec::with_capacity(paths.len());
    for path in paths {
        let (mount, device) =
            open(path).map_err(|source| Error::OpenMount { mount: path.clone(), source })?;
        if let Some(earlier) = devices.iter().position(|&other| other == device) {
            return Err(Error::SameFilesystem {
                first: paths[earlier].clone(),
                second: path.clone(),
            });
        }
        mounts.push(mount);
        devices.push(device);
    }
    Ok(mounts)
}

fn open(path: &PathBuf) -> io::Result<(File, u64)> {
    let mount = File::open(path)?;
    let device = mount.metadata()?.dev();
    Ok((mount, device))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::open_all;
    use crate::program::error::Error;

    #[test]
    fn a_file_system_that_is_named_twice_is_refused() {
        let error = open_all(&[PathBuf::from("/"), PathBuf::from("/.")]).unwrap_err();
        assert!(matches!(error, Error::SameFilesystem { .. }), "{error}");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn a_missing_mount_is_named_in_the_error() {
        let error = open_all(&[PathBuf::from("/no/such/mount")]).unwrap_err();
        assert!(error.to_string().contains("/no/such/mount"), "{error}");
    }
}
