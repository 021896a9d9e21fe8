//! The directories and programs of a run.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};

use crate::args::Args;
use crate::sys;

/// The directories and programs of one run. The directories are removed when this value is dropped.
pub(crate) struct Site {
    scratch: PathBuf,
    /// The directory for sockets. It has a short path, because the path of a socket is limited to
    /// 107 bytes.
    sockets: PathBuf,
    /// The live directory of cairn-blk, on a tmpfs.
    pub(crate) live: PathBuf,
    pub(crate) cairn: PathBuf,
    pub(crate) cairn_blk: PathBuf,
    pub(crate) storage_daemon: PathBuf,
    /// Additional arguments for each cairn-blk.
    pub(crate) blk_args: Vec<String>,
    /// The number of areas so far.
    areas: AtomicU64,
}

impl Site {
    pub(crate) fn new(args: &Args) -> Result<Site> {
        let own = std::env::current_exe().context("finding the path of this program")?;
        let programs = own.parent().context("the path of this program has no directory")?;
        let (cairn, cairn_blk) = (programs.join("cairn"), programs.join("cairn-blk"));
        build(programs)?;
        let storage_daemon = find("qemu-storage-daemon").context(
            "qemu-storage-daemon is missing; it is in Debian's package qemu-system-common",
        )?;
        let id = std::process::id();
        let below = args.scratch.clone().unwrap_or_else(|| programs.to_path_buf());
        let scratch = below.join(format!("cairn-bench-{id}"));
        let sockets = std::env::temp_dir().join(format!("cairn-bench-{id}"));
        let live = PathBuf::from(format!("/dev/shm/cairn-bench-{id}"));
        let blk_args = args.blk_arg.clone();
        // From here on, dropping `site` removes the directories if a step fails.
        let areas = AtomicU64::new(0);
        let site =
            Site { scratch, sockets, live, cairn, cairn_blk, storage_daemon, blk_args, areas };
        for directory in [&site.scratch, &site.sockets] {
            fs::create_dir_all(directory)
                .with_context(|| format!("creating the directory {}", directory.display()))?;
        }
        // Paths must not depend on the working directory of this process.
        let mut site = site;
        site.scratch = fs::canonicalize(&site.scratch).context("finding the scratch directory")?;
        // Only ext4 supports this. Other file systems refuse it and need it less.
        let _ = sys::spread_out(&site.scratch);
        Ok(site)
    }

    /// `cairn`, in a network namespace if one is named.
    pub(crate) fn cairn_in(&self, namespace: Option<&str>) -> Command {
        let Some(namespace) = namespace else { return Command::new(&self.cairn) };
        // `ip` replaces itself by the program, so the process id is that of the program.
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(&self.cairn);
        command
    }

    /// A directory for the files of one measurement.
    pub(crate) fn area(&self) -> Result<Area> {
        // The name differs from those of earlier runs, because ext4 chooses the place of a
        // directory by its name.
        let number = self.areas.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        let area = Area { files: self.scratch.join(&name), sockets: self.sockets.join(&name) };
        for directory in [&area.files, &area.sockets] {
            fs::create_dir_all(directory)
                .with_context(|| format!("creating the directory {}", directory.display()))?;
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

/// Files and sockets of one measurement. Dropping it frees their space and waits until the disk is
/// idle.
///
/// The files themselves stay, empty, until the end of the run. The reason is ext4 without a
/// journal: it does not reuse the inode of a file that was removed in the last minutes, and its
/// search for another inode takes so long that it would disturb the measurement. For the same
/// reason each area is in its own part of the disk.
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
        let _ = truncate_all(&self.files);
        let _ = fs::remove_dir_all(&self.sockets);
        sys::settle();
    }
}

/// Truncates all files in a directory and its subdirectories.
fn truncate_all(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            truncate_all(&entry.path())?;
        } else if kind.is_file() {
            // Segments may be read-only, so their permissions are changed first.
            let _ = fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o600));
            File::create(entry.path())?;
        }
    }
    Ok(())
}

/// Builds the programs under test, so that no outdated ones are measured.
fn build(programs: &Path) -> Result<()> {
    let target = programs.parent().context("the programs are in no target directory")?;
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    if !workspace.exists() {
        // This program was copied without its sources, so the existing programs are used.
        return match programs.join("cairn-blk").exists() && programs.join("cairn").exists() {
            true => Ok(()),
            false => bail!("cairn and cairn-blk are not in {}", programs.display()),
        };
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--release", "-p", "cairn-backend", "-p", "cairn"])
        // With the features that this program was built with, so that no dependency is built twice.
        .args(["-p", "cairn-bench"])
        .arg("--manifest-path")
        .arg(workspace)
        .arg("--target-dir")
        .arg(target)
        .status()
        .context("starting cargo")?;
    match status.success() && programs.ends_with("release") {
        true => Ok(()),
        false if !programs.ends_with("release") => {
            bail!("build with --release: results of a debug build are meaningless")
        }
        false => bail!("building cairn-blk and cairn failed: {status}"),
    }
}

/// The path of a program that is on the search path.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}
