//! The directory of one test.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::image;
use crate::tools::Tools;

/// A repository, for the command lines of the programs.
#[derive(Clone, Debug)]
pub(crate) enum Store {
    Directory(PathBuf),
    Cluster { catalog: String, keys: PathBuf },
}

impl Store {
    /// The options that name the repository.
    pub(crate) fn arguments(&self) -> Vec<String> {
        match self {
            Store::Directory(path) => vec!["--store".into(), format!("dir:{}", path.display())],
            Store::Cluster { catalog, keys } => vec![
                "--store".into(),
                format!("cairn://{catalog}"),
                "--keys".into(),
                keys.display().to_string(),
            ],
        }
    }
}

/// A directory with a repository, mirrors, sockets, images and logs.
#[derive(Debug)]
pub struct Lab {
    directory: TempDir,
    tools: Tools,
    store: Store,
}

impl Lab {
    /// Creates a lab with a repository in its directory, which is removed when the lab is dropped.
    pub fn new(name: &str) -> Result<Lab> {
        let tools = Tools::find()?;
        let directory = tempfile::Builder::new().prefix(&format!("cairn-{name}-")).tempdir()?;
        let store = Store::Directory(directory.path().join("repository"));
        Ok(Lab { directory, tools, store })
    }

    /// Makes all further commands use another repository.
    pub(crate) fn set_store(&mut self, store: Store) {
        self.store = store;
    }

    /// The path of a file in this lab.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `cairn` on the lab's repository, which must succeed, and returns its output.
    pub fn cairn(&self, arguments: &[&str]) -> Result<String> {
        self.cairn_at(&self.store, arguments)
    }

    /// Runs `cairn` on another repository, which must succeed, and returns its output.
    pub(crate) fn cairn_at(&self, store: &Store, arguments: &[&str]) -> Result<String> {
        let output = Command::new(&self.tools.cairn)
            .args(store.arguments())
            .args(arguments)
            .output()
            .with_context(|| format!("cannot start {}", self.tools.cairn.display()))?;
        ensure!(
            output.status.success(),
            "cairn {} ended with {}:\n{}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Imports an ext4 file system with `data` files of 1 MiB as `image`. Returns the imported
    /// file.
    pub fn import_ext4(&self, image: &str, size: u64, data: u64) -> Result<PathBuf> {
        let content = tempfile::tempdir_in(self.directory.path())?;
        image::fill(content.path(), data)?;
        let file = self.path(&format!("{image}.ext4"));
        image::ext4(&file, size, content.path())?;
        self.import(&file, image)?;
        Ok(file)
    }

    /// Imports the raw disk `file` as `image`.
    pub fn import(&self, file: &Path, image: &str) -> Result<()> {
        self.cairn(&["import", &file.display().to_string(), image])?;
        Ok(())
    }

    /// Writes a snapshot to a raw file, which it replaces, and returns its path.
    pub fn export(&self, snapshot: &str) -> Result<PathBuf> {
        let file = self.path(&format!("{snapshot}.raw"));
        self.cairn(&["export", "--force", snapshot, &file.display().to_string()])?;
        Ok(file)
    }

    /// The space that the repository in the lab's directory takes on the host's disk, in bytes.
    pub fn repository_bytes(&self) -> Result<u64> {
        disk_usage(&self.path("repository"))
    }

    /// The socket at which connections of `guest` to the vsock port `port` of the host arrive.
    pub fn vsock_port(&self, guest: &str, port: u32) -> PathBuf {
        self.path(&format!("{guest}.vsock_{port}"))
    }

    /// Keeps the directory and returns its path.
    pub fn keep(mut self) -> PathBuf {
        self.directory.disable_cleanup(true);
        self.directory.path().to_path_buf()
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn tools(&self) -> &Tools {
        &self.tools
    }

    /// The host's end of a guest's vsock. See [`Lab::vsock_port`].
    pub(crate) fn vsock(&self, guest: &str) -> PathBuf {
        self.path(&format!("{guest}.vsock"))
    }

    /// Removes a socket that an ended process has left.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(e).with_context(|| format!("cannot remove {}", path.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Runs a test in its own lab. If the test fails, the lab with its logs is kept.
pub fn in_lab(name: &str, test: impl FnOnce(&Lab) -> Result<()>) {
    let lab = Lab::new(name).unwrap_or_else(|e| panic!("{e:#}"));
    run_test(name, lab, test);
}

/// Runs a test in `lab`. If the test fails, the lab is kept.
pub(crate) fn run_test(name: &str, lab: Lab, test: impl FnOnce(&Lab) -> Result<()>) {
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| test(&lab)));
    if !matches!(outcome, Ok(Ok(()))) {
        eprintln!("{name}: logs, images and the repository are in {}", lab.keep().display());
    }
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => panic!("{error:#}"),
        Err(panic) => panic::resume_unwind(panic),
    }
}

fn disk_usage(path: &Path) -> Result<u64> {
    /// The unit of `st_blocks`, on any file system.
    const SECTOR: u64 = 512;
    let metadata = fs::symlink_metadata(path)?;
    let mut bytes = metadata.blocks() * SECTOR;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            bytes += disk_usage(&entry?.path())?;
        }
    }
    Ok(bytes)
}
