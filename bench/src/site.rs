//! Where files and sockets are, and which programs are measured.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};

use crate::args::Args;
use crate::sys;

/// The place of one run. Everything in it is gone with it.
pub(crate) struct Site {
    scratch: PathBuf,
    /// Short, because a socket's path is limited to 107 bytes.
    sockets: PathBuf,
    /// On a tmpfs.
    pub(crate) live: PathBuf,
    pub(crate) cairn: PathBuf,
    pub(crate) cairn_blk: PathBuf,
    pub(crate) storage_daemon: PathBuf,
    /// More arguments for each cairn-blk.
    pub(crate) blk_args: Vec<String>,
    /// How many areas there were.
    areas: AtomicU64,
}

impl Site {
    pub(crate) fn new(args: &Args) -> Result<Site> {
        let own = std::env::current_exe().context("find the own program")?;
        let programs = own.parent().context("the own program is in no directory")?;
        let (cairn, cairn_blk) = (programs.join("cairn"), programs.join("cairn-blk"));
        build(programs)?;
        let storage_daemon = find("qemu-storage-daemon")
            .context("qemu-storage-daemon is missing; Debian has it in qemu-system-common")?;
        let id = std::process::id();
        let below = args.scratch.clone().unwrap_or_else(|| programs.to_path_buf());
        let scratch = below.join(format!("cairn-bench-{id}"));
        let sockets = std::env::temp_dir().join(format!("cairn-bench-{id}"));
        let live = PathBuf::from(format!("/dev/shm/cairn-bench-{id}"));
        let blk_args = args.blk_arg.clone();
        // From here on the directories are removed again, whatever fails.
        let areas = AtomicU64::new(0);
        let site =
            Site { scratch, sockets, live, cairn, cairn_blk, storage_daemon, blk_args, areas };
        for directory in [&site.scratch, &site.sockets] {
            fs::create_dir_all(directory)
                .with_context(|| format!("make the directory {}", directory.display()))?;
        }
        // A socket's path must not depend on where the run was started.
        let mut site = site;
        site.scratch = fs::canonicalize(&site.scratch).context("find the scratch directory")?;
        // Not everywhere; where it is refused, it is not needed as much.
        let _ = sys::spread_out(&site.scratch);
        Ok(site)
    }

    /// A directory for the files of one measurement.
    pub(crate) fn area(&self) -> Result<Area> {
        // No name of an earlier run: ext4 chooses the place by it.
        let number = self.areas.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        let area = Area { files: self.scratch.join(&name), sockets: self.sockets.join(&name) };
        for directory in [&area.files, &area.sockets] {
            fs::create_dir_all(directory)
                .with_context(|| format!("make the directory {}", directory.display()))?;
        }
        Ok(area)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.scratch);
        let _ = fs::remove_dir_all(&self.sockets);
        let _ = fs::remove_dir_all(&self.live);
    }
}

/// Files and sockets of one measurement. Afterwards their space is free again, and the disk at rest.
///
/// The files themselves stay, empty, until the end of the run: ext4 without a journal does not give the
/// inode of a file that was removed some minutes ago to another, and looks for one that it can give for
/// so long that it would be measured. For the same reason each area is in a part of the disk of its own.
pub(crate) struct Area {
    files: PathBuf,
    sockets: PathBuf,
}

impl Area {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.files.join(name)
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.sockets.join(name)
    }

    /// The address of the area's repository.
    pub(crate) fn store(&self) -> String {
        format!("dir:{}", self.path("repository").display())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        let _ = empty(&self.files);
        let _ = fs::remove_dir_all(&self.sockets);
        sys::settle();
    }
}

/// Takes the content of all files.
fn empty(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            empty(&entry.path())?;
        } else if kind.is_file() {
            // Blobs are read-only, which does not stop their owner.
            let _ = fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o600));
            File::create(entry.path())?;
        }
    }
    Ok(())
}

/// Brings the programs beside this one up to date: a stale one would be measured otherwise.
fn build(programs: &Path) -> Result<()> {
    let target = programs.parent().context("the programs are in no target directory")?;
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    if !workspace.exists() {
        // A copied program, away from its sources: take what is there.
        return match programs.join("cairn-blk").exists() && programs.join("cairn").exists() {
            true => Ok(()),
            false => bail!("cairn and cairn-blk are not in {}", programs.display()),
        };
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--release", "-p", "cairn-backend", "-p", "cairn"])
        .arg("--manifest-path")
        .arg(workspace)
        .arg("--target-dir")
        .arg(target)
        .status()
        .context("start cargo")?;
    match status.success() && programs.ends_with("release") {
        true => Ok(()),
        false if !programs.ends_with("release") => bail!("build with --release to measure"),
        false => bail!("cairn-blk and cairn cannot be built: {status}"),
    }
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}
