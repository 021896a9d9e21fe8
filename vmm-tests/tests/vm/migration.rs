//! A guest migrates to another hypervisor on the same host. Its disk keeps the same backend.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vmm_tests::{Backend, Disk, Guest, Migration, image, in_lab};

use crate::MIB;

/// Bytes of each numbered block.
const BLOCK: usize = 32 << 10;

/// How long each step may take.
const LIMIT: Duration = Duration::from_secs(60);

const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
const DATA_SUM: &str = "cat /mnt/data/* | sha256sum";
const DROP_CACHE: &str = "verifier drop-cache /mnt/data/*";

#[test]
fn a_writing_guest_moves_to_another_qemu_and_loses_nothing() {
    in_lab("migration", |lab| {
        lab.import_ext4("vm", 256 * MIB, 24)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot_migratable(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        let boot_id = guest.run(BOOT_ID)?;
        let data = guest.run(DATA_SUM)?;
        keep_memory_changing(&mut guest)?;
        keep_cache_changing(&mut guest)?;
        start_writer(&mut guest)?;
        wait_for_blocks(&mut guest, 5)?;

        let mut migration = Migration::begin(lab, guest, "vm-moved", &[backend.socket()])?;
        // All of the memory has been sent. Data that the backend writes to memory from here on
        // reaches the target only if the backend marks the pages as dirty.
        wait_until("all memory is sent once", || Ok(migration.passes()? >= 1))?;
        wait_for_requests(&backend, 50)?;
        let mut guest = migration.finish()?;

        guest.run("touch /run/calm")?;
        assert_eq!(guest.run(BOOT_ID)?, boot_id, "the guest has rebooted");
        assert_eq!(
            guest.run(DATA_SUM)?,
            data,
            "the guest's cache differs from the data on its disk"
        );
        let arrived = blocks(&mut guest)?;
        wait_for_blocks(&mut guest, arrived + 5)?;
        let written = stop_writer(&mut guest)?;
        guest.run(&format!("sync && {DROP_CACHE} /mnt/blocks"))?;
        assert_eq!(guest.run(DATA_SUM)?, data, "the data on the guest's disk has changed");
        verify(&mut guest, written)?;
        assert_eq!(kernel_errors(&mut guest)?, "");
        assert_eq!(backend.stats()?.errors, 0);

        let control = backend.control().display().to_string();
        let snapshot = lab.cairn(&["checkpoint", "--control", &control, "--wait", "stable"])?;
        let file = lab.export(snapshot.trim())?;
        image::recover(&file)?;
        assert!(
            image::read(&file, "/blocks")? == expected(written),
            "the snapshot differs from the written data"
        );
        guest.power_off()?;
        backend.stop()
    });
}

/// Changes memory faster than QEMU sends it, until the file `/run/calm` exists.
fn keep_memory_changing(guest: &mut Guest) -> Result<()> {
    guest.run("dd if=/dev/urandom of=/run/noise bs=1M count=8 2>/dev/null")?;
    let change = "dd if=/run/noise of=/run/changed bs=1M conv=notrunc";
    guest.run(&format!("(while test ! -e /run/calm; do {change}; done) >/dev/null 2>&1 &"))?;
    Ok(())
}

/// Reads the imported data into the guest's cache repeatedly, until the file `/run/calm` exists.
/// Only the backend writes to that memory.
fn keep_cache_changing(guest: &mut Guest) -> Result<()> {
    let read = "for file in /mnt/data/*; do test -e /run/calm || cat $file; done";
    let step = format!("{DROP_CACHE}; {read}");
    guest.run(&format!("(while test ! -e /run/calm; do {step}; done) >/dev/null 2>&1 &"))?;
    Ok(())
}

/// Appends numbered blocks to `/mnt/blocks`, syncs each and reads it back from the disk, until the
/// file `/run/stop` exists or a block is wrong. `/run/count` contains the number of correct blocks.
fn start_writer(guest: &mut Guest) -> Result<()> {
    let write = format!(
        "yes $n | head -c {BLOCK} > /run/block && \
         dd if=/run/block of=/mnt/blocks bs={BLOCK} seek=$((n-1)) conv=notrunc,fsync"
    );
    let check = format!(
        "dd if=/mnt/blocks of=/run/again bs={BLOCK} skip=$((n-1)) count=1 iflag=direct && \
         cmp /run/block /run/again"
    );
    let count = "echo $n > /run/next && mv /run/next /run/count";
    let step = format!("n=$((n+1)); {{ {write} && {check} && {count}; }} || break");
    guest.run(&format!(
        "echo 0 > /run/count; \
         (n=0; while test ! -e /run/stop; do {step}; done; touch /run/ended) >/run/writer 2>&1 &"
    ))?;
    Ok(())
}

/// Stops the writer, which must have found no wrong block, and returns the number of blocks.
fn stop_writer(guest: &mut Guest) -> Result<u64> {
    guest.run("touch /run/stop")?;
    wait_until("the writer ends", || Ok(guest.attempt("test -e /run/ended")?.code == 0))?;
    let written = blocks(guest)?;
    let length = guest.run("stat -c %s /mnt/blocks")?;
    ensure!(
        length.trim().parse() == Ok(written * BLOCK as u64),
        "{written} blocks are correct of {length}bytes:\n{}",
        guest.run("tail /run/writer")?
    );
    Ok(written)
}

/// The number of blocks that the writer has written and found correct.
fn blocks(guest: &mut Guest) -> Result<u64> {
    guest.run("cat /run/count")?.trim().parse().context("reading the count of blocks")
}

fn wait_for_blocks(guest: &mut Guest, count: u64) -> Result<()> {
    wait_until("the writer makes progress", || {
        let ended = guest.attempt("test -e /run/ended")?.code == 0;
        ensure!(!ended, "the writer has stopped:\n{}", guest.run("tail /run/writer")?);
        Ok(blocks(guest)? >= count)
    })
}

/// Waits until the guest has made `count` more reads and `count` more writes.
fn wait_for_requests(backend: &Backend, count: u64) -> Result<()> {
    let before = backend.stats()?;
    wait_until("the guest reads and writes", || {
        let now = backend.stats()?;
        Ok(now.reads >= before.reads + count && now.writes >= before.writes + count)
    })
}

/// Compares all blocks inside the guest.
fn verify(guest: &mut Guest, count: u64) -> Result<()> {
    let expected = format!("for n in $(seq {count}); do yes $n | head -c {BLOCK}; done");
    guest.run(&format!("({expected}) | cmp - /mnt/blocks"))?;
    Ok(())
}

/// Errors about the disk in the log of the guest's kernel.
fn kernel_errors(guest: &mut Guest) -> Result<String> {
    guest.run("dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|virtio.*(error|fail)' || true")
}

/// The blocks 1 to `count` as the writer writes them.
fn expected(count: u64) -> Vec<u8> {
    let block = |number: u64| format!("{number}\n").into_bytes().into_iter().cycle().take(BLOCK);
    (1..=count).flat_map(block).collect()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + LIMIT;
    while !holds()? {
        ensure!(Instant::now() < end, "not within {LIMIT:?}: {what}");
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
