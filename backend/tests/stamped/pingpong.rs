//! Two queues that take turns: a write on the second queue is sent only when the guest knows that
//! the write on the first one is done, and the other way round. So a snapshot can hold `A = n`
//! without `B = n`, but never `B = n` without `A = n`.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::history::{Kind, NEVER, Write};
use super::load::{BLOCK, Shared};
use super::stamp::{self, SECTOR, WriteId};
use crate::support::device::{Device, Io, Layout, Queue};

/// A pair of blocks that take turns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    /// The first sector of the block that queue 0 writes.
    pub(crate) a: u64,
    /// The first sector of the block that queue 1 writes.
    pub(crate) b: u64,
}

/// The writes of one pair in their order: A, B, A, B and so on.
pub(crate) type Turns = Vec<WriteId>;

/// Plays all pairs at once until told to stop.
pub(crate) fn run(
    device: &mut Device,
    pairs: &[Pair],
    shared: &Shared,
) -> (Vec<Write>, Vec<Turns>) {
    let (to_a, from_b) = channel();
    let (to_b, from_a) = channel();
    for pair in 0..pairs.len() {
        to_a.send(pair).expect("the receiver is here");
    }
    let [first, second] = &mut device.queues[..] else { panic!("the game needs two queues") };
    let a: Vec<u64> = pairs.iter().map(|pair| pair.a).collect();
    let b: Vec<u64> = pairs.iter().map(|pair| pair.b).collect();
    let (a_log, b_log) = std::thread::scope(|scope| {
        let a = scope.spawn(move || play(first, &a, from_b, to_b, shared));
        let b = scope.spawn(move || play(second, &b, from_a, to_a, shared));
        (a.join().expect("queue 0"), b.join().expect("queue 1"))
    });
    let mut writes: Vec<(usize, Write)> = a_log.into_iter().chain(b_log).collect();
    writes.sort_by_key(|(_, write)| write.submitted);
    let mut turns = vec![Turns::new(); pairs.len()];
    for (pair, write) in &writes {
        turns[*pair].push(write.id);
    }
    (writes.into_iter().map(|(_, write)| write).collect(), turns)
}

/// One side: for each pair that arrives, write its block, then hand the turn over.
fn play(
    queue: &mut Queue,
    blocks: &[u64],
    turns: Receiver<usize>,
    other: Sender<usize>,
    shared: &Shared,
) -> Vec<(usize, Write)> {
    let mut log = Vec::new();
    let mut pending: Vec<Option<(usize, Write)>> = (0..blocks.len()).map(|_| None).collect();
    loop {
        if queue.in_flight() == 0 {
            // Only here, with nothing to wait for on the queue, may a turn be waited for.
            match turns.recv_timeout(Duration::from_millis(10)) {
                Ok(pair) if !shared.stopped() => {
                    start(queue, &mut pending, pair, blocks[pair], shared)
                }
                Err(RecvTimeoutError::Timeout) if !shared.stopped() => {}
                _ => return log,
            }
            continue;
        }
        while let Ok(pair) = turns.try_recv() {
            if !shared.stopped() {
                start(queue, &mut pending, pair, blocks[pair], shared);
            }
        }
        for done in queue.reap(1) {
            let acknowledged = shared.clock.tick();
            done.result.unwrap_or_else(|e| panic!("write: {e}"));
            let (pair, write) = pending[done.slot].take().expect("a write was in the slot");
            shared.note(&write);
            log.push((pair, Write { acknowledged, ..write }));
            // When the other side is gone, the game is over.
            let _ = other.send(pair);
        }
    }
}

fn start(
    queue: &mut Queue,
    pending: &mut [Option<(usize, Write)>],
    pair: usize,
    sector: u64,
    shared: &Shared,
) {
    let slot = queue.take_slot().expect("a slot for each pair");
    let id = shared.next_write();
    let mut data = vec![0; BLOCK as usize * SECTOR];
    stamp::stamp_range(&mut data, sector, id, shared.seed);
    queue.fill(slot, Layout::PLAIN, &data);
    let sectors = sector..sector + BLOCK;
    let submitted = shared.clock.tick();
    let offset = sector * SECTOR as u64;
    queue.submit(slot, Io::Write { offset, len: data.len() }, Layout::PLAIN);
    let write = Write { id, kind: Kind::Stamp, sectors, submitted, acknowledged: NEVER };
    pending[slot] = Some((pair, write));
}

/// How many of the turns a snapshot holds on each side.
pub(crate) fn score(pair: Pair, turns: &Turns, disk: &[u8], seed: u64) -> (usize, usize) {
    let count = |first: u64, parity: usize| {
        let at = first as usize * SECTOR;
        match stamp::read(&disk[at..at + SECTOR], first, seed) {
            stamp::Content::Write(0) | stamp::Content::Zeros => 0,
            stamp::Content::Write(id) => {
                let turn = turns.iter().position(|&turn| turn == id).expect("a turn of this pair");
                assert_eq!(turn % 2, parity, "a write of the other side");
                turn / 2 + 1
            }
            stamp::Content::Garbage(what) => panic!("sector {first}: {what}"),
        }
    };
    (count(pair.a, 0), count(pair.b, 1))
}
