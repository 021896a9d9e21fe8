//! A mirror on a disk with sectors of 4 KiB, for a guest with sectors of 512 bytes.

mod support;

use std::fs;
use std::process::Command;
use std::thread;

use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::device::{Io, Queue, SECTOR, Shape};
use support::{repository, sys};

const CHUNK: u32 = 64 << 10;
const QUEUES: usize = 4;
/// The end of the disk is inside a block.
const SECTORS: u64 = 4096 + 3;
/// Neighbouring sectors up to here belong to different queues.
const SHARED_SECTORS: u64 = 64;
const REQUESTS: u64 = 3000;
const SEED: u64 = 1;

/// Mounts an ext4 file system on a device whose sectors have 4 KiB, if that is possible here.
fn mount_large_sectors(site: &Site) -> Option<sys::Mounted> {
    let (image, place) = (site.path("device"), site.path("mounted"));
    fs::create_dir(&place).expect("a place to mount");
    fs::File::create(&image).and_then(|file| file.set_len(128 << 20)).expect("a sparse file");
    let mut make = Command::new("mke2fs");
    make.args(["-q", "-F", "-t", "ext4", "-b", "4096"]).arg(&image);
    assert!(make.status().expect("mke2fs runs").success());
    match sys::mount_image(&image, &place, 4096) {
        Ok(mounted) => Some(mounted),
        Err(error) => {
            eprintln!("skipped: no image can be mounted here: {error}");
            None
        }
    }
}

/// Writes, zeroes and reads sectors of `own`, which no other queue writes. `disk` is what this queue
/// expects there.
fn use_queue(queue: &mut Queue, rng: &mut Rng, own: &[(u64, u64)], disk: &mut [u8]) {
    for _ in 0..REQUESTS {
        let (first, count) = rng.pick(own);
        let skip = rng.below(count);
        let len = (1 + rng.below((count - skip).min(40))) * SECTOR;
        let offset = (first + skip) * SECTOR;
        let expected = &mut disk[offset as usize..(offset + len) as usize];
        match rng.below(8) {
            0 | 1 => {
                let found = queue.read(offset, len as usize).expect("read");
                assert!(found == expected, "{len} bytes at {offset}");
            }
            2 => {
                let io = Io::WriteZeroes { offset, len, unmap: rng.chance(50) };
                queue.run(io, &[]).expect("write zeroes");
                expected.fill(0);
            }
            _ => {
                expected.fill_with(|| rng.below(256) as u8);
                queue.write(offset, expected).expect("write");
            }
        }
    }
}

#[test]
fn a_disk_with_sectors_of_4_kib_serves_sectors_of_512_bytes() {
    let site = Site::new();
    let Some(_mounted) = mount_large_sectors(&site) else { return };
    let mut rng = Rng::new(SEED);
    let mut disk: Vec<u8> = (0..SECTORS * SECTOR).map(|_| rng.below(256) as u8).collect();
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let mirror = site.path("mounted").join("mirror");
    let backend = Backend::start(&Options { mirror, queues: QUEUES, ..Options::new(&site) });
    let mut device = backend.device(Shape { queues: QUEUES, ..Shape::default() });
    assert_eq!(device.capacity, SECTORS * SECTOR);
    // Each queue has every fourth sector of the shared part, and a quarter of the rest.
    let rest = (SECTORS - SHARED_SECTORS) / QUEUES as u64;
    let own = |queue: u64| -> Vec<(u64, u64)> {
        let shared = (queue..SHARED_SECTORS).step_by(QUEUES).map(|sector| (sector, 1));
        let start = SHARED_SECTORS + queue * rest;
        let len = if queue + 1 == QUEUES as u64 { SECTORS - start } else { rest };
        shared.chain([(start, len); SHARED_SECTORS as usize / QUEUES]).collect()
    };
    let mut control = backend.control();
    let views: Vec<Vec<u8>> = thread::scope(|scope| {
        let threads: Vec<_> = device
            .queues
            .iter_mut()
            .zip(0..)
            .map(|(queue, index)| {
                let (mut view, mut rng) = (disk.clone(), Rng::new(SEED + 1 + index));
                scope.spawn(move || {
                    use_queue(queue, &mut rng, &own(index), &mut view);
                    view
                })
            })
            .collect();
        for _ in 0..3 {
            control.checkpoint_to_the_end();
        }
        threads.into_iter().map(|thread| thread.join().expect("a queue")).collect()
    });
    for (queue, view) in (0..).zip(&views) {
        for (first, count) in own(queue) {
            let range = (first * SECTOR) as usize..((first + count) * SECTOR) as usize;
            disk[range.clone()].copy_from_slice(&view[range]);
        }
    }
    assert!(device.read_all() == disk, "the disk");
    let last = control.checkpoint().expect("a checkpoint");
    control.wait_until_quiet();
    assert!(repository::export(&site.store(), IMAGE, last.number) == disk, "the snapshot");
}
