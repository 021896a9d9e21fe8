//! The programs that are compared, with their defaults.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::site::{Site, find};

pub(crate) const CAIRN: &str = "cairn";
pub(crate) const RESTIC: &str = "restic";
pub(crate) const BORG: &str = "borg";
const BORG_ENCRYPTED: &str = "borg, repokey";

/// The password of the repositories that are encrypted.
const PASSWORD: &str = "benchmark";

/// A program that stores disk images.
pub(crate) enum Contender {
    /// `cairn`, at this path, with a repository in a directory.
    Cairn(PathBuf),
    /// restic always compresses and encrypts.
    Restic,
    /// borg always compresses. Its encryption has no default: it is named here.
    Borg { name: &'static str, encryption: &'static str },
}

/// The directories of one contender in one round: the repository, and the program's caches.
pub(crate) struct Workplace(PathBuf);

impl Workplace {
    pub(crate) fn create(directory: &Path) -> Result<Workplace> {
        let work = Workplace(directory.to_owned());
        for part in [work.repository(), work.0.join("cache")] {
            fs::create_dir_all(&part).with_context(|| format!("creating {}", part.display()))?;
        }
        Ok(work)
    }

    pub(crate) fn repository(&self) -> PathBuf {
        self.0.join("repository")
    }
}

impl Contender {
    /// The names of all contenders, in the order of the tables.
    pub(crate) const NAMES: [&str; 4] = [CAIRN, RESTIC, BORG, BORG_ENCRYPTED];

    pub(crate) fn all(site: &Site) -> Result<Vec<Contender>> {
        for program in ["restic", "borg"] {
            find(program).with_context(|| {
                format!("{program} is missing; run `scripts/install-packages bench`")
            })?;
        }
        Ok(vec![
            Contender::Cairn(site.cairn.clone()),
            Contender::Restic,
            Contender::Borg { name: BORG, encryption: "none" },
            Contender::Borg { name: BORG_ENCRYPTED, encryption: "repokey" },
        ])
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Contender::Cairn(_) => CAIRN,
            Contender::Restic => RESTIC,
            Contender::Borg { name, .. } => name,
        }
    }

    /// Creates the repository. `cairn import` does so itself.
    pub(crate) fn prepare(&self, work: &Workplace) -> Result<()> {
        match self {
            Contender::Cairn(_) => Ok(()),
            Contender::Restic => run(self.command(work).arg("init")),
            Contender::Borg { encryption, .. } => {
                run(self.command(work).args(["init", "--encryption", encryption]))
            }
        }
    }

    /// Stores the image as a version with this number.
    pub(crate) fn store(&self, work: &Workplace, image: &Path, version: u32) -> Result<()> {
        let mut command = self.command(work);
        run(match self {
            Contender::Cairn(_) => command.arg("import").arg(image).arg(format!("v{version}")),
            Contender::Restic => {
                command.args(["backup", "--tag", &format!("v{version}")]).arg(image)
            }
            Contender::Borg { .. } => command.arg("create").arg(format!("::v{version}")).arg(image),
        })
    }

    /// Removes the first version, and frees its space.
    pub(crate) fn remove_first(&self, work: &Workplace) -> Result<()> {
        match self {
            Contender::Cairn(_) => {
                run(self.command(work).args(["rm", "v1"]))?;
                run(self.command(work).args(["gc", "--grace", "0"]))
            }
            Contender::Restic => {
                run(self.command(work).args(["forget", "--keep-last", "1", "--prune"]))
            }
            Contender::Borg { .. } => {
                run(self.command(work).args(["delete", "::v1"]))?;
                run(self.command(work).arg("compact"))
            }
        }
    }

    /// Starts a process that prints the second version.
    pub(crate) fn read_second(&self, work: &Workplace, image: &Path) -> Result<Child> {
        let mut command = self.command(work);
        match self {
            Contender::Cairn(_) => command.args(["export", "v2", "-"]),
            Contender::Restic => command.args(["dump", "latest"]).arg(image),
            Contender::Borg { .. } => command.args(["extract", "--stdout", "::v2"]),
        };
        command
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().display()))
    }

    /// The program, with its repository, its password and its caches on the disk that is measured.
    fn command(&self, work: &Workplace) -> Command {
        let (repository, cache) = (work.repository(), work.0.join("cache"));
        match self {
            Contender::Cairn(program) => {
                let mut command = Command::new(program);
                command.env("CAIRN_STORE", format!("dir:{}", repository.display()));
                command
            }
            Contender::Restic => {
                let mut command = Command::new("restic");
                command.env("RESTIC_REPOSITORY", repository).env("RESTIC_CACHE_DIR", cache);
                command.env("RESTIC_PASSWORD", PASSWORD).arg("--quiet");
                command
            }
            Contender::Borg { .. } => {
                let mut command = Command::new("borg");
                command.env("BORG_REPO", repository).env("BORG_BASE_DIR", cache);
                command.env("BORG_PASSPHRASE", PASSWORD);
                // borg asks before it uses a repository without encryption for the first time.
                command.env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
                command
            }
        }
    }
}

/// Runs a command, which must succeed.
fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!(
            "{program} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
