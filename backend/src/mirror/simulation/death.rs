//! The process dies, and the next one takes over.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::sync::Arc;

use cairn_store::SnapshotState;
use tempfile::TempDir;

use super::kernel::{Kind, Operation};
use super::ring::Write;
use super::{CHUNKS, Plant, WORKERS, World, ring};
use crate::mirror::copies::{Arena, Places, Shelf};
use crate::mirror::cut::Cut;
use crate::mirror::epoch::Epochs;
use crate::mirror::events::Events;
use crate::mirror::intent::Intent;
use crate::mirror::journal::Journal;
use crate::mirror::layer::{Epoch, Layer};
use crate::mirror::layout::{BLOCK, Layout};
use crate::mirror::presence::Presence;
use crate::mirror::recovery::{Recovered, recover};
use crate::mirror::{Mirror, Room};

/// The mirror that a process finds in `dir`, and the checkpoints that it has to go on with.
pub(super) fn open(
    dir: &TempDir,
    layout: Layout,
    (shelf, passage): (u64, u64),
    states: &HashMap<u64, SnapshotState>,
) -> (Mirror, Vec<Arc<Layer>>) {
    let file = |name: &str| {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        options.open(dir.path().join(name)).unwrap()
    };
    let presence = file("presence");
    presence.set_len(Presence::shared_len(layout.block_count())).unwrap();
    let presence = Presence::shared(&presence, 0, layout.block_count()).unwrap();
    presence.recount();
    let (epochs, mut found) = Epochs::open(dir.path(), CHUNKS).unwrap();
    if found.is_empty() {
        found.push(epochs.take().unwrap());
        found[0].begin(Epoch(1));
    }
    let room = Room {
        shelf: Shelf::new(file("shelf"), shelf * BLOCK).unwrap(),
        passage: Arena::new((passage * BLOCK) as usize),
        spill: Places::new(200 * BLOCK),
    };
    let journal = Arc::new(Journal::open(&dir.path().join("journal")).unwrap());
    let Recovered { current, layers, resumed } =
        recover(found, &journal, &layout, &room, |number| states.get(&number).copied()).unwrap();
    let cut = Cut::new(epochs, journal, WORKERS, current, layers);
    let intent = std::fs::read(dir.path().join("intent")).unwrap_or(vec![0; 8]);
    let (intent, events) = (Intent::new(&intent), Events::new(Vec::new()));
    (Mirror::new(layout, presence, intent, cut, room, events), resumed)
}

impl World {
    /// What the kernel has in its hands lands or not; all else of the process is gone.
    fn die(&mut self) {
        self.deaths += 1;
        for Operation { kind, left, .. } in std::mem::take(&mut self.kernel) {
            match kind {
                Kind::Write { job, mut permit, .. } => {
                    permit.returned = true;
                    let Write { span, version } = job.write;
                    for block in left {
                        if self.rng.chance(50) {
                            self.disk[block as usize] = version;
                        }
                    }
                    let blocks = self.layout.blocks(span);
                    for block in blocks.first..blocks.end() {
                        self.torn[block as usize].push((permit.epoch, version));
                    }
                }
                Kind::Fill { .. } => {
                    for block in left {
                        if self.rng.chance(50) {
                            self.disk[block as usize] = self.parent[block as usize];
                        }
                    }
                }
                Kind::Copy { .. } | Kind::Spill { .. } | Kind::Persist { .. } => {}
            }
        }
        self.parked.iter_mut().for_each(Vec::clear);
        if self.plant == Some(Plant::LostRecord) {
            let path = self.dir.path().join("journal");
            let journal = OpenOptions::new().write(true).open(path).unwrap();
            let len = journal.metadata().unwrap().len();
            journal.set_len(len.saturating_sub(64)).unwrap();
        }
        self.commits.clear();
        let (mirror, resumed) = open(&self.dir, self.layout, self.room, &self.states);
        self.mirror = mirror;
        self.commits = resumed;
        let entrance = |worker| self.mirror.cut.entrance(worker);
        self.entrances = (0..WORKERS).map(entrance).collect();
        self.queues = ring::open(&self.ledgers, &self.rings);
        if self.plant == Some(Plant::LostLedgerEntry) {
            self.queues[0].lose_one(&self.rings[0]);
            self.queues = ring::open(&self.ledgers, &self.rings);
        }
    }

    /// Whether the process dies now, as in so many of a thousand cases. The next one has taken over then.
    pub(super) fn dies(&mut self, per_mille: u64) -> bool {
        let dies = !self.calm && self.rng.below(1000) < per_mille;
        if dies {
            self.die();
        }
        dies
    }
}
