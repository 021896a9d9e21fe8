//! Runs `cairn` in a temporary directory.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use cairn_store::{
    Attachment, ChangedChunks, ChunkIndex, Consistency, Metadata, MirrorId, MirrorOwner, Mode,
    NewBlob, NewSnapshot, Repository, Root,
};
use serde_json::Value;
use tempfile::TempDir;

use crate::writer::NO_COPY;

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

/// A writer of snapshots at chosen times, in this process.
pub(crate) struct Timeline {
    attachment: Attachment,
}

impl Timeline {
    /// Attaches a mirror to an image of the place's repository.
    pub(crate) fn attach(place: &Place, image: &str) -> Timeline {
        let url = format!("dir:{}", place.path("repository").display());
        Timeline::attach_to(&Repository::open(&url).unwrap(), image)
    }

    /// Attaches a mirror to an image.
    pub(crate) fn attach_to(repository: &Repository, image: &str) -> Timeline {
        let newest = repository.catalog().resolve(&image.parse().unwrap()).unwrap();
        let mut id = [0; 16];
        id[..image.len().min(16)].copy_from_slice(&image.as_bytes()[..image.len().min(16)]);
        let owner = MirrorOwner::this_process(MirrorId::from_bytes(id), "/mirror").unwrap();
        let attachment = repository.attach(&owner, &newest, Mode::ReadWrite).unwrap();
        Timeline { attachment }
    }

    fn announce(&self, time: u64, is_from_guest: bool) -> u64 {
        let number = self.attachment.reserve(1).unwrap().start;
        let new = NewSnapshot {
            number,
            label: None,
            metadata: Metadata::default(),
            is_from_guest,
            size: self.attachment.geometry().size(),
            consistency: Consistency::Crash,
            time,
            dirty_bytes: number << 10,
            pause_us: 0,
        };
        self.attachment.begin(&new).unwrap();
        number
    }

    /// Takes a snapshot, at a time in seconds since 1970. Returns its number.
    pub(crate) fn take(&self, time: u64) -> u64 {
        self.take_from(time, false)
    }

    /// Takes a snapshot at each of these times.
    pub(crate) fn take_all(&self, times: &[u64]) {
        for time in times {
            self.take(*time);
        }
    }

    /// As [`Timeline::take`], and whether the guest has asked for it.
    pub(crate) fn take_from(&self, time: u64, is_from_guest: bool) -> u64 {
        let number = self.announce(time, is_from_guest);
        self.attachment.announced(number).publish_tree(&Root::default(), 0, number << 10).unwrap();
        number
    }

    /// Takes a snapshot in which a chunk has other content, which goes through the repository that the
    /// timeline is attached to. Returns its number.
    pub(crate) fn take_changed(
        &self,
        repository: &Repository,
        time: u64,
        (chunk, content): (u64, &[u8]),
    ) -> u64 {
        let number = self.announce(time, false);
        let blob = NewBlob::new(content);
        repository.put_chunks(std::slice::from_ref(&blob)).unwrap();
        let changes: ChangedChunks = [(ChunkIndex(chunk), Some(blob.chunk_id()))].into();
        let stored = content.len() as u64;
        self.attachment.announced(number).publish(&changes, stored, NO_COPY).unwrap();
        number
    }

    /// Announces a snapshot that is not stored.
    pub(crate) fn pending(&self, time: u64) -> u64 {
        self.announce(time, false)
    }

    /// Takes a snapshot that fails.
    pub(crate) fn fail(&self, time: u64) -> u64 {
        let number = self.announce(time, false);
        self.attachment.fail(number, "the test wants it").unwrap();
        number
    }

    /// Ends the use of the image. No mirror refers to it any more.
    pub(crate) fn detach(self) {
        self.attachment.detach().unwrap();
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
