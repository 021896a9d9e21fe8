//! Runs `cairn` in a temporary directory.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A temporary directory with a repository.
pub(crate) struct Place {
    pub(crate) dir: TempDir,
}

/// The result of a run of the program.
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        command.args(args).current_dir(self.dir.path()).env("CAIRN_STORE", "dir:repository");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Run {
        self.command(args).output().unwrap().into()
    }

    pub(crate) fn run_with_input(&self, args: &[&str], input: &[u8]) -> Run {
        let mut child = self
            .command(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A program that fails early does not read its input.
        let _ = child.stdin.take().unwrap().write_all(input);
        child.wait_with_output().unwrap().into()
    }

    /// Runs a command, which must succeed, and returns its output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!(run.code, 0, "{args:?}: {}", run.stderr);
        String::from_utf8(run.stdout).unwrap()
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).unwrap()
    }

    /// Writes a sparse disk of 3 MiB with a few blocks of data.
    pub(crate) fn disk(&self, name: &str) -> Vec<u8> {
        use std::os::unix::fs::FileExt;
        let file = File::create(self.path(name)).unwrap();
        file.set_len(3 << 20).unwrap();
        for (at, byte) in [(0, 1), (4096 * 65, 2), ((3 << 20) - 4096, 3)] {
            file.write_all_at(&[byte; 4096], at).unwrap();
        }
        file.sync_all().unwrap();
        fs::read(self.path(name)).unwrap()
    }

    /// The repository's first segment.
    pub(crate) fn segment(&self) -> PathBuf {
        self.path("repository/segments/00000001")
    }
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().expect("no signal ends the program"),
            stdout: output.stdout,
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}
