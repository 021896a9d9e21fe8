//! The backend is killed repeatedly under a running guest.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use seeded_rng::mix;
use verifier::Writer;
use vmm_tests::{Backend, Disk, Guest, in_lab};

use crate::MIB;

/// The number of kills in one run.
const KILLS: u64 = 100;

/// The number of threads in the guest. Each one always has a request in flight.
const WRITERS: u64 = 24;

/// How long the guest may wait for one request.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

const SIZE: u64 = 16 * MIB;

#[test]
fn a_guest_survives_a_hundred_kills_of_its_backend() {
    in_lab("kills", |lab| {
        let raw = lab.path("empty.raw");
        std::fs::File::create(&raw)?.set_len(SIZE)?;
        lab.import(&raw, "vm")?;
        let disk = Disk::of("vm", "vm");
        let mut backend = Backend::start(lab, &disk)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run(&format!("verifier /dev/vda {WRITERS} /run/stop >/run/verdict 2>&1 &"))?;

        let seed = u64::from(std::process::id());
        println!("the seed is {seed}");
        let mut accepted = Vec::new();
        for kill in 0..KILLS {
            wait_for_writes(&backend, 50).with_context(|| {
                format!("after {kill} kills: {:?}", guest.run("cat /run/verdict"))
            })?;
            let draw = mix(seed << 16 ^ kill);
            thread::sleep(Duration::from_millis(draw % 150));
            if draw.is_multiple_of(3) {
                let control = backend.control().display().to_string();
                let snapshot = lab.cairn(&["checkpoint", "--control", &control])?;
                accepted.push(snapshot.trim().to_owned());
                // The kill comes while the checkpoint is stored.
                thread::sleep(Duration::from_millis(mix(draw) % 30));
            }
            backend.kill()?;
            backend = Backend::start(lab, &disk)?;
        }

        guest.run("touch /run/stop")?;
        let verdict = wait_for_verdict(&mut guest)?;
        println!("{KILLS} kills, {} checkpoints: {verdict}", accepted.len());
        ensure!(verdict.starts_with("OK"), "{verdict}");
        let slowest =
            verdict.trim_end_matches(" ms").rsplit(' ').next().and_then(|ms| ms.parse().ok());
        let slowest = Duration::from_millis(slowest.context("the verdict contains no time")?);
        ensure!(slowest < REQUEST_LIMIT, "a request took {slowest:?}");
        let errors = guest.run("dmesg | grep -iE 'I/O error|virtio.*(error|fail)' || true")?;
        assert_eq!(errors, "");

        let control = backend.control().display().to_string();
        let last = lab.cairn(&["checkpoint", "--control", &control, "--wait", "stable"])?;
        accepted.push(last.trim().to_owned());
        check_snapshots(lab, &accepted)?;
        guest.power_off()?;
        backend.stop()
    });
}

/// Checks that every accepted checkpoint exists, contains a state that the disk had, and is not
/// older than the one before it.
fn check_snapshots(lab: &vmm_tests::Lab, snapshots: &[String]) -> Result<()> {
    let mut before = vec![0; WRITERS as usize];
    for snapshot in snapshots {
        let content = std::fs::read(lab.export(snapshot)?)?;
        for index in 0..WRITERS {
            let blocks = SIZE / verifier::BLOCK as u64;
            let writer = Writer { index, writers: WRITERS, blocks };
            let newest =
                writer.check(&content).map_err(anyhow::Error::msg).context(snapshot.clone())?;
            let before = &mut before[index as usize];
            ensure!(
                newest >= *before,
                "{snapshot} has write {newest} of writer {index}, the one before it has {before}"
            );
            *before = newest;
        }
    }
    Ok(())
}

/// Waits until the guest has written `count` times since the start of the backend.
fn wait_for_writes(backend: &Backend, count: u64) -> Result<()> {
    let end = Instant::now() + 2 * REQUEST_LIMIT;
    while backend.stats()?.writes < count {
        ensure!(Instant::now() < end, "the guest does not write");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn wait_for_verdict(guest: &mut Guest) -> Result<String> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let verdict = guest.run("cat /run/verdict")?.trim().to_owned();
        if !verdict.is_empty() {
            return Ok(verdict);
        }
        ensure!(Instant::now() < end, "the verifier does not end");
        thread::sleep(Duration::from_millis(200));
    }
}
