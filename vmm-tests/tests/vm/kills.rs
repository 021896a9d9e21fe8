//! The backend dies under a running guest, again and again.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use seeded_rng::mix;
use verifier::Writer;
use vmm_tests::{Backend, Disk, Guest, in_lab};

use crate::MIB;

/// Deaths in one run.
const KILLS: u64 = 100;

/// Threads in the guest, each with a request in flight at any time.
const WRITERS: u64 = 24;

/// The longest that the guest may wait for one request.
const HANG: Duration = Duration::from_secs(10);

const SIZE: u64 = 16 * MIB;

#[test]
fn a_guest_survives_a_hundred_deaths_of_its_backend() {
    in_lab("kills", |lab| {
        let raw = lab.path("empty.raw");
        std::fs::File::create(&raw)?.set_len(SIZE)?;
        lab.import(&raw, "vm")?;
        let disk = Disk::of("vm", "vm");
        let mut backend = Backend::start(lab, &disk)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run(&format!("verifier /dev/vda {WRITERS} /run/stop >/run/verdict 2>&1 &"))?;

        let seed = u64::from(std::process::id());
        println!("the seed of the times is {seed}");
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
                // While it is stored.
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
        let slowest = Duration::from_millis(slowest.context("no time in the verdict")?);
        ensure!(slowest < HANG, "a request took {slowest:?}");
        let complaints = guest.run("dmesg | grep -iE 'I/O error|virtio.*(error|fail)' || true")?;
        assert_eq!(complaints, "");

        let control = backend.control().display().to_string();
        let last = lab.cairn(&["checkpoint", "--control", &control, "--wait", "stable"])?;
        accepted.push(last.trim().to_owned());
        check_snapshots(lab, &accepted)?;
        guest.power_off()?;
        backend.stop()
    });
}

/// Every checkpoint that was accepted is there, holds a state that the disk went through, and none is
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
            ensure!(newest >= *before, "{snapshot} has {newest} of writer {index}, not {before}");
            *before = newest;
        }
    }
    Ok(())
}

/// Waits until the guest has written so often since the backend's start.
fn wait_for_writes(backend: &Backend, count: u64) -> Result<()> {
    let end = Instant::now() + 2 * HANG;
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
