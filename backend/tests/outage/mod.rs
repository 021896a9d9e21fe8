//! A guest and its backend, which is killed from time to time. Recorded are the operations on the
//! mirror, and the states of the repository meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cairn_store::Snapshot;
use crash_images::{Mounted, Recording};
use seeded_rng::Rng;
use tempfile::TempDir;

use crate::support::backend::{Backend, IMAGE, Options, Site};
use crate::support::repository;
use crate::survivor::{
    BLOCK, DEPTH, Manner, Moment, QUEUES, Request, SECTOR, Survivor, holds, stamp,
};

const CHUNK: u32 = 64 << 10;
/// A small part of the disk is written, on both sides of the border between two regions.
const BORDER: usize = 64 << 20;
/// Parts of the guest's blocks.
const PARTS: u64 = 16;
pub(crate) const WINDOW: usize = PARTS as usize * QUEUES * DEPTH * BLOCK;
pub(crate) const START: usize = BORDER - WINDOW / 2;
const SIZE: usize = BORDER + WINDOW;
pub(crate) const SECTORS: usize = WINDOW / SECTOR;

/// The version that the image has at first.
pub(crate) const FIRST: u32 = 1;

pub(crate) const MIRROR: &str = "vm1";
const HANG: Duration = Duration::from_secs(30);

/// What a run did, for the checks of what is left of it.
pub(crate) struct Run {
    pub(crate) recording: Recording,
    pub(crate) looks: Vec<Look>,
    /// The content of each snapshot that became stable.
    pub(crate) snapshots: BTreeMap<u64, Vec<u8>>,
    _copies: TempDir,
}

/// A state of the repository. The copy is shared while nothing is published.
#[derive(Clone)]
pub(crate) struct Look {
    pub(crate) stable: Vec<u64>,
    pub(crate) copy: PathBuf,
}

/// A checkpoint that was accepted, and the versions that it may hold.
struct Taken {
    number: u64,
    least: Vec<u32>,
    most: Vec<u32>,
}

/// A guest, its backend, and what they leave.
struct Scene {
    mounted: Arc<Mounted>,
    options: Options,
    rng: Rng,
    guest: Survivor,
    backend: Backend,
    /// Has the log of the backend, so it is dropped later.
    site: Site,
    looks: Vec<Look>,
    /// The directory of its copies.
    copies: TempDir,
    taken: Vec<Taken>,
    kills: u64,
}

pub(crate) fn run(seed: u64, rounds: usize) -> Run {
    let site = Site::new();
    let live = TempDir::new_in("/dev/shm").expect("a directory on a tmpfs");
    let mounted = Arc::new(Mounted::new());
    repository::import(&site.store(), IMAGE, CHUNK, &first_disk());
    let mut rng = Rng::new(seed);
    // With little copy-on-write memory, copies go to the disk, too.
    let memory = rng.pick(&["1", "64"]);
    let mirror = mounted.root().join(MIRROR);
    let options = Options { mirror, live: live.path().into(), ..Options::new(&site) };
    let options = options.with(&["--cow-memory", memory]);
    let manner = rng.pick(&[Manner::UsedIndex, Manner::AvailableIndex, Manner::NoLedger]);
    let mut guest = Survivor::new(manner, WINDOW / BLOCK, Rng::new(rng.next_u64()));
    guest.first_sector = (START / SECTOR) as u64;
    guest.acked.fill(FIRST);
    guest.sent.fill(FIRST);
    let marks = Arc::clone(&mounted);
    guest.observer = Box::new(move |moment, request| {
        let text = match (moment, request) {
            (_, Request::Read { .. }) => return,
            (Moment::Sent, Request::Flush { number }) => format!("flushing {number}"),
            (Moment::Answered, Request::Flush { number }) => format!("flushed {number}"),
            (_, Request::Write { sectors, version }) => {
                let word = if moment == Moment::Sent { "writing" } else { "written" };
                format!("{word} {} {} {version}", sectors.start, sectors.end)
            }
        };
        marks.mark(&text);
    });
    let backend = Backend::start(&options);
    mounted.mark("serving");
    guest.connect(&options.socket).expect("connect");
    let mut scene = Scene {
        mounted,
        options,
        rng,
        guest,
        backend,
        site,
        looks: Vec::new(),
        copies: TempDir::new_in("/dev/shm").expect("a directory on a tmpfs"),
        taken: Vec::new(),
        kills: 0,
    };
    scene.look();
    for round in 0..rounds {
        scene.round();
        if round + 1 < rounds {
            scene = scene.killed();
        }
    }
    scene.finished()
}

impl Scene {
    /// The guest writes in several parts of the disk, and checkpoints are taken meanwhile.
    fn round(&mut self) {
        self.guest.flush_share = self.rng.pick(&[0, 2, 10]);
        for _ in 0..self.rng.between(1, 4) {
            self.move_on();
            let steps = self.rng.between(1, 8);
            self.run(steps);
            if self.rng.chance(70) {
                // Data that is not changed while a checkpoint is stored does not differ from it.
                self.move_on();
                let steps = self.rng.below(3);
                self.run(steps);
                self.checkpoint();
                if self.rng.chance(60) {
                    self.wait_until_stable();
                }
            }
        }
    }

    /// The guest moves to another part of the disk, large or small, on one side of the border or on
    /// both.
    fn move_on(&mut self) {
        let start = self.rng.below(PARTS);
        let len = self.rng.pick(&[1, 2, PARTS / 2]);
        self.guest.part = start..PARTS.min(start + len);
    }

    /// The guest goes on for a few milliseconds.
    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.guest.run(Duration::from_millis(2));
            self.look();
        }
    }

    fn checkpoint(&mut self) {
        self.guest.turn();
        let least = self.guest.acked.clone();
        if let Ok(accepted) = self.backend.control().checkpoint() {
            let most = self.guest.sent.clone();
            self.taken.push(Taken { number: accepted.number, least, most });
        }
    }

    /// Observes the repository while the backend does not change it.
    fn look(&mut self) {
        self.backend.while_stopped(|| {
            self.looks.push(look(&self.site.repository(), self.copies.path(), self.looks.last()));
            self.mounted.mark("looked");
        });
    }

    /// Does the same while the guest goes on.
    fn wait_until_stable(&mut self) {
        let mut control = self.backend.control();
        let deadline = Instant::now() + HANG;
        while !control.status().pending.is_empty() {
            assert!(Instant::now() < deadline, "checkpoints are pending");
            self.run(1);
        }
        self.stable();
    }

    /// Waits until all checkpoints are stable.
    fn stable(&self) {
        self.taken.iter().for_each(|taken| self.mounted.mark(&format!("stable {}", taken.number)));
    }

    /// Kills the process. The next one takes over.
    fn killed(mut self) -> Scene {
        self.backend.kill();
        self.kills += 1;
        self.mounted.mark(&format!("killed {}", self.kills));
        while self.rng.chance(20) {
            let early = Backend::spawn(&self.options, |_| {});
            self.guest.run(Duration::from_micros(self.rng.below(20_000)));
            early.kill();
        }
        self.backend = Backend::spawn(&self.options, |_| {});
        self.look();
        self.guest.connect(&self.options.socket).expect("connect again");
        self.run(1);
        self.mounted.mark(&format!("taken up {}", self.kills));
        self
    }

    /// Ends the run, cleanly or not.
    fn finished(mut self) -> Run {
        if self.rng.chance(50) {
            self.guest.finish(HANG);
            self.guest.check_all();
            self.wait_until_stable();
            self.backend.terminate();
            self.mounted.mark("stopped");
        } else {
            self.backend.control().wait_until_quiet();
            self.stable();
            self.backend.kill();
        }
        self.looks.push(look(&self.site.repository(), self.copies.path(), self.looks.last()));
        let store = self.site.store();
        let snapshot = |taken: &Taken| {
            let window = export(&store, taken.number);
            check_window(&window, &taken.least, &taken.most);
            (taken.number, window)
        };
        Run {
            snapshots: self.taken.iter().map(snapshot).collect(),
            recording: self.mounted.recording(),
            looks: self.looks,
            _copies: self.copies,
        }
    }
}

fn first_disk() -> Vec<u8> {
    let window = (0..SECTORS).flat_map(|sector| stamp(sector, FIRST).repeat(SECTOR / 8));
    let mut disk = vec![0; SIZE];
    disk.splice(START..START + WINDOW, window);
    disk
}

pub(crate) fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-r").arg(from).arg(to).status();
    assert!(copied.expect("start cp").success(), "copy {}", from.display());
}

pub(crate) fn address(repository: &Path) -> String {
    format!("dir:{}", repository.display())
}

/// Copies the repository, unless it is unchanged.
fn look(repository: &Path, copies: &Path, last: Option<&Look>) -> Look {
    let number = fs::read_dir(copies).expect("list the copies").count();
    let path = copies.join(number.to_string());
    copy(repository, &path);
    let snapshots =
        repository::open(&address(&path)).catalog().snapshots(&repository::image(IMAGE));
    let is_stable = |one: &Snapshot| one.require_content().is_ok();
    let stable = snapshots.expect("list the snapshots").into_iter().filter(is_stable);
    let stable: Vec<_> = stable.map(|one| one.number).collect();
    match last.filter(|last| last.stable == stable) {
        Some(last) => {
            fs::remove_dir_all(path).expect("remove a copy");
            last.clone()
        }
        None => Look { stable, copy: path },
    }
}

/// The content of a snapshot where the guest writes.
pub(crate) fn export(store: &str, number: u64) -> Vec<u8> {
    repository::export(store, IMAGE, number)[START..START + WINDOW].to_vec()
}

/// Whether each sector has a version that it may have.
pub(crate) fn check_window(window: &[u8], least: &[u32], most: &[u32]) {
    for (sector, bytes) in window.chunks(SECTOR).enumerate() {
        let (least, most, found) = (least[sector], most[sector], &bytes[..8]);
        let right = holds(sector, bytes, least..=most);
        assert!(right, "sector {sector}: {found:?}, not version {least} to {most}");
    }
}
