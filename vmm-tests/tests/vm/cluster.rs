//! A guest whose checkpoints are in a cluster that loses half of its peers.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmm_tests::{Backend, Disk, Guest, Lab, image, in_cluster};

use crate::MIB;

/// With `rs=4+4`, four of eight peers may be lost.
const PEERS: usize = 8;

/// How long a state may take. Storing a checkpoint is retried for a minute, and so is completing
/// it.
const STATE_LIMIT: Duration = Duration::from_secs(90);

#[test]
fn a_guest_survives_the_loss_of_its_host_and_of_four_of_eight_peers() {
    in_cluster("cluster", PEERS, |lab, cluster| {
        lab.import_ext4("vm", 64 * MIB, 8)?;
        let shown: Value = serde_json::from_str(&lab.cairn(&["--json", "show", "vm"])?)?;
        assert_eq!(shown["redundancy"], "rs=4+4", "the default for eight peers");
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        guest.run("dd if=/dev/urandom of=/mnt/noise bs=64k count=64")?;
        checkpoint(&mut guest)?;

        // The catalog's disk is lost. The guest continues, and so do its checkpoints.
        cluster.lose_catalog(lab)?;
        guest.run("echo after the loss > /mnt/after && sync")?;
        let files = guest.run(FILES)?;
        let first = checkpoint_again(&mut guest)?;
        let before = sum(&lab.export(&first)?)?;
        guest.run("echo rolled back > /mnt/later && rm /mnt/data/03 && sync")?;

        // The host and half of the peers are lost together.
        guest.kill()?;
        lose_host(lab, backend)?;
        let (lost, rest) = ([0, 2, 3, 6], [1, 4, 5, 7]);
        let ids = lost.iter().map(|at| cluster.id(*at)).collect::<Result<Vec<_>>>()?;
        for at in lost {
            cluster.destroy(at)?;
        }

        // Another host with an empty mirror.
        let name = "elsewhere".to_owned();
        let elsewhere = Disk { name, optimistic: true, ..Disk::of("vm", &first) };
        let backend = Backend::start(lab, &elsewhere)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        let disk = guest.run("sha256sum < /dev/vda")?;
        assert_eq!(
            disk.split(' ').next(),
            Some(before.as_str()),
            "the disk differs from the checkpoint"
        );
        ensure!(backend.stats()?.fetched_bytes > 0, "an empty mirror must fetch data");
        guest.run("e2fsck -fn /dev/vda && mount /dev/vda /mnt")?;
        assert_eq!(guest.run(FILES)?, files);
        assert_ne!(guest.attempt("cat /mnt/later")?.code, 0, "it was written after the checkpoint");

        // Four peers are enough for an available checkpoint.
        guest.run("dd if=/dev/urandom of=/mnt/meanwhile bs=64k count=8")?;
        let meanwhile = guest.run("cairn-agent checkpoint --freeze /mnt")?.trim().to_owned();
        wait_for_state(lab, &meanwhile, "available")?;
        let content = sum(&lab.export(&meanwhile)?)?;

        // New peers replace the lost ones, and the guest continues.
        for id in &ids {
            cluster.lose(lab, id)?;
        }
        cluster.refill(lab, PEERS)?;
        let report = cluster.repair(lab)?;
        assert_eq!((&report["left"], &report["survives"]), (&0.into(), &4.into()), "{report}");
        wait_for_state(lab, &meanwhile, "stable")?;
        guest.run("dd if=/dev/urandom of=/mnt/more bs=64k count=32")?;
        let files = guest.run(FILES)?;
        let second = checkpoint(&mut guest)?;
        guest.kill()?;
        lose_host(lab, backend)?;

        // The other four of the first eight peers are lost too. Only new peers remain.
        for at in rest {
            cluster.destroy(at)?;
        }
        assert_eq!(sum(&lab.export(&first)?)?, before);
        assert_eq!(sum(&lab.export(&meanwhile)?)?, content);
        let file = lab.export(&second)?;
        image::check_clean(&file)?;
        let more = image::read(&file, "/more")?;
        let copy = lab.path("more");
        fs::write(&copy, more)?;
        ensure!(
            files.contains(&sum(&copy)?),
            "{second} lacks the data that was written last:\n{files}"
        );
        Ok(())
    });
}

/// A command that prints the checksums of all files of the disk.
const FILES: &str = "cd /mnt && find . -type f | sort | xargs sha256sum; cd /";

fn checkpoint(guest: &mut Guest) -> Result<String> {
    let answer = guest.run("cairn-agent checkpoint --freeze /mnt --wait stable")?;
    Ok(answer.trim().to_owned())
}

/// Takes a checkpoint as soon as the disk has found its rebuilt catalog.
fn checkpoint_again(guest: &mut Guest) -> Result<String> {
    let end = Instant::now() + STATE_LIMIT;
    loop {
        let answer = guest.attempt("cairn-agent checkpoint --freeze /mnt --wait stable")?;
        if answer.code == 0 {
            return Ok(answer.text.trim().to_owned());
        }
        ensure!(Instant::now() < end, "no checkpoint within {STATE_LIMIT:?}: {}", answer.text);
        thread::sleep(Duration::from_secs(1));
    }
}

fn wait_for_state(lab: &Lab, snapshot: &str, wanted: &str) -> Result<()> {
    let end = Instant::now() + STATE_LIMIT;
    loop {
        let shown: Value = serde_json::from_str(&lab.cairn(&["--json", "show", snapshot])?)?;
        if shown["state"] == wanted {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{snapshot} is not {wanted} within {STATE_LIMIT:?}: {shown}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Kills the backend and deletes all its data on the host.
fn lose_host(lab: &Lab, backend: Backend) -> Result<()> {
    let mirror = backend.mirror().to_path_buf();
    backend.kill()?;
    for gone in [mirror, lab.path("live")] {
        fs::remove_dir_all(&gone).with_context(|| format!("deleting {}", gone.display()))?;
    }
    Ok(())
}

/// The SHA-256 of a file, as the guest's tool prints it.
fn sum(file: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg("--").arg(file).output()?;
    ensure!(output.status.success(), "sha256sum ended with {}", output.status);
    let text = String::from_utf8(output.stdout)?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}
