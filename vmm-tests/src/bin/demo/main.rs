//! A demonstration of Cairn: a checkpoint requested inside a guest, the loss of the machine, and a
//! restart that fetches only the data that it reads. `demo cluster` uses a repository on eight
//! peers and loses four of them too.

use std::fs;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use cairn_agent::{Accepted, Stable};
use serde_json::Value;
use vmm_tests::{Backend, Cluster, Disk, Guest, Lab};

use stage::{Stage, bytes, milliseconds, seconds};

mod stage;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 256 * MIB;
const DATA_FILES: u64 = 40;

const PEERS: usize = 8;
/// The peers that are destroyed.
const LOST: [usize; 4] = [0, 2, 3, 6];

const STABLE: &str = "the checkpoint became stable";
const SPREAD: &str = "each blob survives the loss of four peers";
const DOWN: &str = "four of the eight peers are down, their data deleted";
const EMPTY: &str = "the second guest started with an empty mirror";
const KEPT: &str = "the file has its content of the checkpoint";
const ROLLED_BACK: &str = "data appended later is rolled back";
const LAZY: &str = "less than a quarter of the image was fetched";
const CLEAN: &str = "the file system is clean, with no journal to replay";
const INTACT: &str = "all other data is unchanged";

fn main() -> ExitCode {
    let checks = [STABLE, EMPTY, KEPT, ROLLED_BACK, LAZY, CLEAN, INTACT];
    match std::env::args().nth(1).as_deref() {
        None => {
            let title = "A checkpoint from inside a guest, and a restart";
            let stage = Stage::open(title, &checks);
            perform(stage, |_| Lab::new("demo").map(|lab| (lab, None)))
        }
        Some("cluster") => {
            let title = "A checkpoint on eight machines, the loss of five, and a restart";
            let [stable, rest @ ..] = checks;
            let checks: Vec<_> = [stable, SPREAD, DOWN].into_iter().chain(rest).collect();
            let stage = Stage::open(title, &checks);
            perform(stage, |stage| {
                let text = "create keys, start a catalog and eight peers with TLS";
                let start = || Cluster::with_lab("demo", PEERS);
                stage.step(text, start).map(|(lab, cluster)| (lab, Some(cluster)))
            })
        }
        Some(other) => {
            eprintln!("unknown demo '{other}'; use no argument, or `cluster`");
            ExitCode::FAILURE
        }
    }
}

/// Runs the demo in a lab that `prepare` creates, and prints the results.
fn perform(
    mut stage: Stage,
    prepare: impl FnOnce(&mut Stage) -> Result<(Lab, Option<Cluster>)>,
) -> ExitCode {
    let (lab, mut cluster) = match prepare(&mut stage) {
        Ok(prepared) => prepared,
        Err(error) => {
            stage.interrupt(&format!("{error:#}"));
            return ExitCode::FAILURE;
        }
    };
    let outcome = play(&lab, cluster.as_mut(), &mut stage);
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

fn play(lab: &Lab, cluster: Option<&mut Cluster>, stage: &mut Stage) -> Result<()> {
    stage
        .step("import an ext4 image of 256 MiB, with 40 MiB of data, into a repository", || {
            lab.import_ext4("vm", SIZE, DATA_FILES)
        })?;

    // The first guest.
    let disk = Disk::of("vm", "vm");
    let backend = stage.step("start cairn-blk on the image", || Backend::start(lab, &disk))?;
    let mut guest = stage.step("boot a guest under QEMU with a disk of cairn-blk", || {
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
    if let Some(cluster) = cluster {
        lose_peers(lab, cluster, stage)?;
    }

    // The second guest.
    let begin = Instant::now();
    let disk = Disk::of("vm", &snapshot);
    let backend =
        stage.step(&format!("start cairn-blk on {snapshot}"), || Backend::start(lab, &disk))?;
    let mut guest = stage.step("boot a second guest with this disk", || {
        Guest::boot(lab, "vm", &[backend.socket()])
    })?;
    // Without a replay of the journal, to see the disk as the checkpoint left it.
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

    stage.measure("pause of the checkpoint, at the disk", milliseconds(taken.accepted.pause_us));
    stage.measure("pause of the checkpoint, freeze to thaw", milliseconds(taken.frozen_us));
    stage.measure("changed since the import", bytes(taken.stable.dirty_bytes));
    stage.measure("stored after deduplication", bytes(taken.stable.stored_bytes));
    stage.measure("time to stable", milliseconds(taken.stable.elapsed_ms * 1000));
    stage.measure("boot of the second guest", seconds(guest.boot_time()));
    stage.measure("from the start to the file's content", seconds(restart));
    stage.measure("fetched until then", format!("{} of {}", bytes(fetched), bytes(SIZE)));
    Ok(())
}

/// Destroys half of the peers.
fn lose_peers(lab: &Lab, cluster: &mut Cluster, stage: &mut Stage) -> Result<()> {
    let report = stage.step("cairn repair: check the redundancy", || cluster.repair(lab))?;
    stage.check(SPREAD, report["survives"] == 4 && report["under"] == 0);
    stage.step("kill four of the eight peers, delete their data", || {
        LOST.iter().try_for_each(|at| cluster.destroy(*at))
    })?;
    stage.step("wait until the catalog reports them as down", || {
        cluster.wait_down(lab, LOST.len())
    })?;
    let list: Value = serde_json::from_str(&lab.cairn(&["--json", "peers"])?)?;
    let down = list["peers"].as_array().into_iter().flatten().filter(|one| one["state"] == "down");
    stage.check(DOWN, down.count() == LOST.len());
    stage.show("cairn peers", &lab.cairn(&["peers"])?);
    Ok(())
}

/// The output of `cairn-agent checkpoint --json`.
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
        parse().with_context(|| format!("parsing the output of the agent: {text}"))
    }
}
