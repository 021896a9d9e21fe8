//! Cairn in one terminal: a checkpoint asked from inside a guest, the loss of the machine, and a
//! restart that fetches only what it touches.

use std::fs;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use cairn_agent::{Accepted, Stable};
use serde_json::Value;
use vmm_tests::{Backend, Disk, Guest, Lab};

use stage::{Stage, bytes, milliseconds, seconds};

mod stage;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 256 * MIB;
const DATA_FILES: u64 = 40;

const STABLE: &str = "the checkpoint became stable";
const EMPTY: &str = "the second guest began on an empty mirror";
const KEPT: &str = "the file is as it was at the checkpoint";
const ROLLED_BACK: &str = "what was appended later is rolled back";
const LAZY: &str = "less than a quarter of the image was fetched";
const CLEAN: &str = "the file system is clean, with nothing to replay";
const INTACT: &str = "all other data reads back as it was";

fn main() -> ExitCode {
    let checks = [STABLE, EMPTY, KEPT, ROLLED_BACK, LAZY, CLEAN, INTACT];
    let mut stage = Stage::open("A checkpoint from inside a guest, and a restart", &checks);
    let lab = match Lab::new("demo") {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = play(&lab, &mut stage);
    if let Err(error) = &outcome {
        stage.interrupt(&format!("{error:#}"));
    }
    let passed = stage.close() && outcome.is_ok();
    if passed {
        return ExitCode::SUCCESS;
    }
    eprintln!("logs, images and the repository are in {}", lab.keep().display());
    ExitCode::FAILURE
}

fn play(lab: &Lab, stage: &mut Stage) -> Result<()> {
    stage
        .step("import an ext4 image of 256 MiB, with 40 MiB of data, into a repository", || {
            lab.import_ext4("vm", SIZE, DATA_FILES)
        })?;

    // The first life.
    let disk = Disk::of("vm", "vm");
    let backend = stage.step("start cairn-blk on the image", || Backend::start(lab, &disk))?;
    let mut guest = stage.step("boot a guest under QEMU, its disk served by cairn-blk", || {
        Guest::boot(lab, "vm", &[backend.socket()])
    })?;
    let data = stage.step("in the guest: mount the disk, read all data, write a file", || {
        guest.run("mount /dev/vda /mnt")?;
        guest.run("echo 'as it was at the checkpoint' > /mnt/file")?;
        guest.run("cat /mnt/data/* | sha256sum")
    })?;
    let taken = stage
        .step("in the guest: cairn-agent checkpoint --freeze /mnt --wait stable", || {
            guest.run("cairn-agent checkpoint --freeze /mnt --wait stable --json")
        })?;
    let taken = Taken::parse(&taken)?;
    stage.check(STABLE, taken.stable.snapshot == taken.accepted.snapshot);
    let snapshot = taken.accepted.snapshot.clone();
    stage.step("in the guest: append to the file, and sync", || {
        guest.run("echo 'written after it' >> /mnt/file && sync")
    })?;
    let mirror = backend.mirror().to_path_buf();
    stage.step("kill the guest, stop cairn-blk, delete its mirror", || {
        guest.kill()?;
        backend.stop()?;
        fs::remove_dir_all(&mirror).with_context(|| format!("deleting {}", mirror.display()))
    })?;
    stage.check(EMPTY, !mirror.exists());

    // The second life.
    let begin = Instant::now();
    let disk = Disk::of("vm", &snapshot);
    let backend =
        stage.step(&format!("start cairn-blk on {snapshot}"), || Backend::start(lab, &disk))?;
    let mut guest =
        stage.step("boot a second guest on it", || Guest::boot(lab, "vm", &[backend.socket()]))?;
    // Without a replay of the journal: the disk is looked at as the checkpoint left it.
    let file = stage.step("in the guest: mount the disk, read the file", || {
        guest.run("mount -o ro,noload /dev/vda /mnt && cat /mnt/file")
    })?;
    let restart = begin.elapsed();
    stage.check(KEPT, file.starts_with("as it was at the checkpoint\n"));
    stage.check(ROLLED_BACK, !file.contains("written after it"));
    let fetched = backend.stats()?.fetched_bytes;
    stage.check(LAZY, fetched > 0 && fetched < SIZE / 4);
    let again = stage.step("in the guest: read all data, check the file system", || {
        let sum = guest.run("cat /mnt/data/* | sha256sum")?;
        guest.run("umount /mnt")?;
        Ok((sum, guest.attempt("e2fsck -fn /dev/vda")?))
    })?;
    stage.check(INTACT, again.0 == data);
    stage.check(CLEAN, again.1.code == 0 && !again.1.text.contains("journal recovery"));

    stage.measure("pause of the checkpoint, the cut", milliseconds(taken.accepted.pause_us));
    stage.measure("pause of the checkpoint, freeze to thaw", milliseconds(taken.frozen_us));
    stage.measure("changed since the import", bytes(taken.stable.dirty_bytes));
    stage.measure("stored after deduplication", bytes(taken.stable.stored_bytes));
    stage.measure("time to stable", milliseconds(taken.stable.elapsed_ms * 1000));
    stage.measure("boot of the second guest", seconds(guest.boot_time()));
    stage.measure("from nothing to the file's content", seconds(restart));
    stage.measure("fetched for that", format!("{} of {}", bytes(fetched), bytes(SIZE)));
    Ok(())
}

/// What `cairn-agent checkpoint --json` prints.
struct Taken {
    frozen_us: u64,
    accepted: Accepted,
    stable: Stable,
}

impl Taken {
    fn parse(text: &str) -> Result<Taken> {
        let parse = || -> Result<Taken> {
            let mut answer: Value = serde_json::from_str(text)?;
            Ok(Taken {
                frozen_us: serde_json::from_value(answer["frozen_us"].take())?,
                accepted: serde_json::from_value(answer["accepted"].take())?,
                stable: serde_json::from_value(answer["stable"].take())?,
            })
        };
        parse().with_context(|| format!("the agent's answer: {text}"))
    }
}
