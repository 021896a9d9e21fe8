//! Snapshots that are taken while the guest writes without pause.
//!
//! A writer stamps every sector with the number of its write. Meanwhile checkpoints are taken, one
//! after the other or at the same time. Afterwards each snapshot is exported and checked:
//! `stamped/checker.rs` defines what is correct.
//!
//! `CAIRN_SEED=n` repeats one run of the random configurations, `CAIRN_SOAK_SECONDS=600` draws new
//! ones for ten minutes. A failure prints its seed.

mod stamped;
mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use cairn_agent::{Refusal, RefusalKind};
use seeded_rng::Rng;
use stamped::checker::{self, Snapshot, Verdict};
use stamped::history::{Base, History, Moment, Write};
use stamped::load::{self, BLOCK, Load, Mix, Shared};
use stamped::pingpong::{self, Pair};
use stamped::stamp::{self, SECTOR};
use support::backend::{Backend, IMAGE, Options, Site};
use support::control::Control;
use support::device::{Device, Shape};
use support::repository;
use support::rng::{Repeat, number_from_env};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// One run.
#[derive(Clone, Copy, Debug)]
struct Config {
    seed: u64,
    chunk: u64,
    disk: u64,
    /// The number of sectors that have at most one write in flight.
    unit: u64,
    queues: usize,
    load: Load,
    cow_memory: Option<u64>,
    /// The number of connections that request checkpoints.
    askers: usize,
    /// The longest pause between an answer and the next request.
    pause: Duration,
    lasts: Duration,
}

impl Config {
    fn plain(seed: u64) -> Config {
        Config {
            seed,
            chunk: 256 * KIB,
            disk: 16 * MIB,
            unit: BLOCK,
            queues: 2,
            load: Load { depth: 16, mix: Mix::BLOCKS, skewed: false },
            cow_memory: None,
            askers: 1,
            pause: Duration::from_millis(40),
            lasts: Duration::from_millis(1500),
        }
    }

    fn random(seed: u64) -> Config {
        let mut rng = Rng::new(seed);
        let mix = Mix {
            parts: rng.below(60),
            blocks: rng.between(1, 60),
            large: rng.pick(&[0, 0, 3, 30]),
            zeroes: rng.pick(&[0, 5, 20]),
            discards: rng.pick(&[0, 5, 20]),
            reads: rng.between(1, 20),
            flushes: rng.below(3),
        };
        Config {
            seed,
            chunk: rng.pick(&[64, 128, 256, 1024, 4096]) * KIB,
            // Not always whole blocks: the last block and chunk may be partial.
            disk: rng.pick(&[4, 8, 16, 32]) * MIB + rng.pick(&[0, 0, 0x200, 0x1a00, 0x11000]),
            unit: rng.pick(&[1, BLOCK]),
            queues: rng.between(1, 2) as usize,
            load: Load { depth: rng.pick(&[1, 2, 8, 32, 64]), mix, skewed: rng.chance(50) },
            cow_memory: rng.pick(&[None, Some(1), Some(4), Some(8)]),
            askers: rng.between(1, 3) as usize,
            pause: Duration::from_millis(rng.pick(&[0, 0, 5, 50])),
            lasts: Duration::from_millis(rng.between(700, 2500)),
        }
    }
}

/// A checkpoint that was accepted, with the moments around its answer.
struct Cut {
    number: u64,
    requested: Moment,
    answered: Moment,
}

/// A disk with stamps of write 0 and holes of all sizes, from a block to several chunks.
fn base_image(config: &Config, rng: &mut Rng) -> (Vec<u8>, Vec<Base>) {
    let sectors = config.disk / SECTOR as u64;
    let mut disk = vec![0; config.disk as usize];
    let mut base = Vec::new();
    while (base.len() as u64) < sectors {
        let kind = rng.pick(&[Base::Hole, Base::Stamped]);
        let len = rng.pick(&[1, 3, 16, 64, 512]) * BLOCK;
        let end = (base.len() as u64 + len).min(sectors);
        base.resize(end as usize, kind);
    }
    for (sector, bytes) in disk.chunks_exact_mut(SECTOR).enumerate() {
        if base[sector] == Base::Stamped {
            stamp::stamp(bytes, sector as u64, 0, config.seed);
        }
    }
    (disk, base)
}

/// Waits for a time up to `longest`. On a slow machine it then waits until the writers have reached
/// `moment`, but not for long. Without a longest time it does not wait at all.
fn pause(longest: Duration, moment: Moment, shared: &Shared, rng: &mut Rng) {
    if longest.is_zero() {
        return;
    }
    std::thread::sleep(Duration::from_micros(rng.below(longest.as_micros() as u64)));
    let end = Instant::now() + 4 * longest;
    while shared.clock.now() < moment && Instant::now() < end && !shared.stopped() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Requests checkpoints until it is stopped.
fn ask(control: &mut Control, config: &Config, shared: &Shared, mut rng: Rng) -> Vec<Cut> {
    let mut cuts = Vec::new();
    while !shared.stopped() && cuts.len() < 24 {
        let requested = shared.clock.tick();
        let answer = control.checkpoint();
        let answered = shared.clock.tick();
        match answer {
            Ok(accepted) => cuts.push(Cut { number: accepted.number, requested, answered }),
            Err(Refusal { kind: RefusalKind::Busy, .. }) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(refusal) => panic!("a checkpoint was refused: {refusal:?}"),
        }
        pause(config.pause, answered + rng.below(200), shared, &mut rng);
    }
    cuts
}

/// What runs while checkpoints are taken. It returns the writes.
type Work<'a> = dyn Fn(&mut Device, &Shared) -> Vec<Write> + Sync + 'a;

/// A run: the history, the checkpoints, and the bytes of each snapshot.
struct Run {
    history: History,
    cuts: Vec<(Cut, Vec<u8>)>,
}

/// Imports a base image, runs `work` while checkpoints are taken, and exports all snapshots.
fn run(config: &Config, work: &Work) -> Run {
    let mut rng = Rng::new(config.seed ^ 0xba5e);
    let site = Site::new();
    let (disk, base) = base_image(config, &mut rng);
    repository::import(&site.store(), IMAGE, config.chunk as u32, &disk);
    let mut options = Options { queues: config.queues, ..Options::new(&site) };
    if let Some(mib) = config.cow_memory {
        options = options.with(&["--cow-memory", &mib.to_string()]);
    }
    let backend = Backend::start(&options);
    let shape = Shape { queues: config.queues, depth: config.load.depth, ..Shape::default() };
    let mut device = backend.device(shape);
    assert_eq!(device.capacity, config.disk);

    let shared = Shared::new(config.seed, config.unit, &base);
    let (writes, mut cuts) = std::thread::scope(|scope| {
        let (shared, device) = (&shared, &mut device);
        let askers: Vec<_> = (0..config.askers)
            .map(|asker| {
                let mut control = backend.control();
                let rng = Rng::new(config.seed ^ asker as u64);
                scope.spawn(move || ask(&mut control, config, shared, rng))
            })
            .collect();
        let work = scope.spawn(move || work(device, shared));
        let end = Instant::now() + config.lasts;
        let asked = || askers.iter().all(|asker| asker.is_finished());
        while Instant::now() < end && !work.is_finished() && !asked() {
            std::thread::sleep(Duration::from_millis(5));
        }
        shared.stop.store(true, Ordering::SeqCst);
        let cuts: Vec<Cut> =
            askers.into_iter().flat_map(|asker| asker.join().expect("an asker")).collect();
        (work.join().expect("the writers"), cuts)
    });
    let now = device.read_all();
    shared.verify(0, &now);

    let mut control = backend.control();
    let requested = shared.clock.tick();
    let number = control.stable_checkpoint();
    cuts.push(Cut { number, requested, answered: shared.clock.tick() });
    control.wait_until_quiet();
    let states = control.list();
    let cuts: Vec<(Cut, Vec<u8>)> = cuts
        .into_iter()
        .map(|cut| {
            let name = format!("{IMAGE}@{}", cut.number);
            let line = states.iter().find(|line| line.snapshot == name);
            assert_eq!(line.map(|line| line.state.as_str()), Some("stable"), "{name}");
            let disk = repository::export(&site.store(), IMAGE, cut.number);
            (cut, disk)
        })
        .collect();
    assert!(cuts.last().expect("there is a last one").1 == now, "the last snapshot is the disk");
    drop(device);
    backend.terminate();
    Run { history: History::new(config.seed, config.unit, base, writes), cuts }
}

/// Checks all snapshots of a run.
fn judge(config: &Config, run: &Run) -> Verdict {
    let mut total = Verdict::default();
    for (cut, disk) in &run.cuts {
        let (requested, answered) = (cut.requested, cut.answered);
        let name = format!("{IMAGE}@{}", cut.number);
        let snapshot = Snapshot { name, requested, answered, disk };
        match checker::check(&run.history, &snapshot) {
            Ok(verdict) => {
                total.in_flight += verdict.in_flight;
                total.split += verdict.split;
            }
            Err(violations) => {
                let lines: Vec<String> = violations.iter().map(|v| format!("  {v}")).collect();
                panic!(
                    "{} (requested at {requested}, answered at {answered}) is wrong:\n{}\n{config:?}",
                    snapshot.name,
                    lines.join("\n")
                );
            }
        }
    }
    println!(
        "seed {}: {} writes, {} snapshots, {} writes in flight at cuts, {} of them split",
        config.seed,
        run.history.writes.len(),
        run.cuts.len(),
        total.in_flight,
        total.split
    );
    total
}

fn write_and_judge(config: Config) {
    let run = run(&config, &|device, shared| {
        std::thread::scope(|scope| {
            let writers: Vec<_> = (1..)
                .zip(&mut device.queues)
                .map(|(index, queue)| {
                    let rng = Rng::new(config.seed.rotate_left(8 * index));
                    scope.spawn(move || load::run(queue, config.load, shared, rng))
                })
                .collect();
            writers.into_iter().flat_map(|writer| writer.join().expect("a writer")).collect()
        })
    });
    assert!(run.cuts.len() > 1, "no checkpoint was accepted while the guest wrote");
    judge(&config, &run);
}

#[test]
fn snapshots_of_block_writes_are_consistent_cuts() {
    write_and_judge(Config::plain(1));
}

#[test]
fn snapshots_of_sector_writes_over_an_imported_image_are_consistent_cuts() {
    let mix = Mix { parts: 80, blocks: 10, ..Mix::BLOCKS };
    let load = Load { depth: 16, mix, skewed: true };
    write_and_judge(Config { chunk: 64 * KIB, disk: 8 * MIB, unit: 1, load, ..Config::plain(2) });
}

#[test]
fn snapshots_of_large_writes_are_consistent_cuts() {
    let mix = Mix { large: 60, blocks: 30, ..Mix::BLOCKS };
    let load = Load { depth: 8, mix, skewed: true };
    write_and_judge(Config { chunk: MIB, disk: 32 * MIB, load, ..Config::plain(3) });
}

#[test]
fn snapshots_of_writes_zeroes_and_discards_are_consistent_cuts() {
    let load = Load { depth: 16, mix: Mix::ALL, skewed: true };
    write_and_judge(Config { disk: 16 * MIB + 0x1a00, load, ..Config::plain(4) });
}

#[test]
fn snapshots_are_consistent_cuts_when_the_space_for_copies_is_short() {
    let load = Load { depth: 32, mix: Mix::ALL, skewed: false };
    let pause = Duration::ZERO;
    let cow_memory = Some(1);
    write_and_judge(Config { chunk: 64 * KIB, load, cow_memory, pause, ..Config::plain(5) });
}

#[test]
fn snapshots_asked_for_back_to_back_and_at_once_are_consistent_cuts() {
    let load = Load { depth: 64, ..Config::plain(6).load };
    let pause = Duration::ZERO;
    let small = Config { chunk: 64 * KIB, disk: 4 * MIB, load, ..Config::plain(6) };
    write_and_judge(Config { askers: 3, pause, ..small });
}

#[test]
fn snapshots_of_a_single_slow_writer_are_consistent_cuts() {
    let load = Load { depth: 1, ..Config::plain(7).load };
    write_and_judge(Config { queues: 1, load, disk: 4 * MIB, ..Config::plain(7) });
}

#[test]
fn random_configurations_give_consistent_cuts() {
    if let Some(seed) = number_from_env("CAIRN_SEED") {
        println!("{:?}", Config::random(seed));
        return write_and_judge(Config::random(seed));
    }
    let soak = Duration::from_secs(number_from_env("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let begin = Instant::now();
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    let mut seeds = Rng::new(time.as_nanos() as u64);
    loop {
        let config = Config::random(seeds.next_u64() >> 32);
        let _repeat = Repeat(config.seed);
        println!("{config:?}");
        write_and_judge(config);
        if begin.elapsed() >= soak {
            return;
        }
    }
}

#[test]
fn a_write_on_one_queue_is_never_there_without_the_one_it_waited_for_on_the_other() {
    let lasts = Duration::from_millis(2500);
    let load = Load { depth: 8, ..Config::plain(8).load };
    let pause = Duration::from_millis(10);
    let config = Config { load, pause, lasts, askers: 2, ..Config::plain(8) };
    // Within a chunk, in adjacent chunks, and far apart in both directions.
    let block = |chunk: u64, block: u64| (chunk * config.chunk / SECTOR as u64) + block * BLOCK;
    let pairs = [
        Pair { a: block(1, 0), b: block(1, 1) },
        Pair { a: block(2, 5), b: block(3, 5) },
        Pair { a: block(4, 0), b: block(60, 9) },
        Pair { a: block(61, 7), b: block(5, 0) },
        Pair { a: block(6, 3), b: block(6, 63) },
    ];
    let turns = std::sync::Mutex::new(Vec::new());
    let run = run(&config, &|device, shared| {
        let (writes, played) = pingpong::run(device, &pairs, shared);
        *turns.lock().expect("nobody else holds it") = played;
        writes
    });
    let turns = turns.into_inner().expect("nobody else holds it");
    judge(&config, &run);
    for (cut, disk) in &run.cuts {
        for (pair, turns) in pairs.iter().zip(&turns) {
            let (a, b) = pingpong::score(*pair, turns, disk, config.seed);
            assert!(a == b || a == b + 1, "{IMAGE}@{} holds A={a}, B={b}: {pair:?}", cut.number);
        }
    }
}
