//! The recording directory behaves like an ordinary one, and its images lose only changes that are
//! not durable.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::Path;

use crash_images::{Draw, Mounted, check_all};

const BLOCK: usize = 4096;

/// Memory that is aligned for direct I/O.
#[repr(align(4096))]
struct Aligned([u8; BLOCK]);

fn has_mark(marks: &[String], text: &str) -> bool {
    marks.iter().any(|mark| mark == text)
}

#[test]
fn synced_data_survives_and_other_data_may_be_lost() {
    let mounted = Mounted::new();
    let root = mounted.root();
    fs::create_dir(root.join("d")).unwrap();
    let (first, last) = (root.join("d/first"), root.join("d/last"));
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(&first).unwrap();
    file.write_all_at(&[1; 2 * BLOCK], 0).unwrap();
    mounted.mark("written");
    file.sync_data().unwrap();
    mounted.mark("synced");
    let direct = libc::O_DIRECT | libc::O_DSYNC;
    let through = OpenOptions::new().write(true).custom_flags(direct).open(&first).unwrap();
    through.write_all_at(&Aligned([2; BLOCK]).0, BLOCK as u64).unwrap();
    mounted.mark("written through");
    fs::rename(&first, &last).unwrap();
    symlink("elsewhere", root.join("d/link")).unwrap();
    File::open(root.join("d")).unwrap().sync_all().unwrap();
    File::open(root).unwrap().sync_all().unwrap();
    mounted.mark("named");
    file.set_len(BLOCK as u64).unwrap();

    assert_eq!(fs::read(&last).unwrap(), [1; BLOCK]);
    assert_eq!(fs::read_link(root.join("d/link")).unwrap(), Path::new("elsewhere"));
    assert_eq!(fs::read_dir(root.join("d")).unwrap().count(), 2);
    file.try_lock().unwrap();
    assert!(File::open(&last).unwrap().try_lock().is_err(), "the file is locked");

    let (mut lost, mut torn) = (false, false);
    let seen = std::sync::Mutex::new((&mut lost, &mut torn));
    let check = |image: &Path, marks: &[String]| {
        let named = ["d/last", "d/first"].map(|name| fs::read(image.join(name)).ok());
        assert!(named.iter().flatten().count() <= 1, "half of a rename survives");
        assert!(!has_mark(marks, "named") || named[0].is_some(), "the name is lost");
        let is_link = fs::read_link(image.join("d/link")).is_ok();
        assert!(!has_mark(marks, "named") || is_link, "the link is lost");
        let mut seen = seen.lock().unwrap();
        let Some(bytes) = named.into_iter().flatten().next() else { return *seen.0 = true };
        if has_mark(marks, "synced") {
            assert!(bytes[..BLOCK] == [1; BLOCK], "synced data is lost");
        } else if has_mark(marks, "written") {
            *seen.1 |= bytes.contains(&0);
        }
        if has_mark(marks, "written through") && bytes.len() > BLOCK {
            assert!(bytes[BLOCK..] == [2; BLOCK], "data of a durable write is lost");
        }
    };
    let draw = Draw { seed: 1, images: 16, atom: 512 };
    let images = check_all(&mounted.recording(), draw, check).unwrap_or_else(|one| panic!("{one}"));
    assert!(images > 20 && lost && torn, "{images} images, lost: {lost}, torn: {torn}");
}

#[test]
fn a_directory_is_unmounted_even_while_a_file_in_it_is_open() {
    let mounted = Mounted::new();
    let root = mounted.root().to_owned();
    let _open = File::create(root.join("file")).unwrap();
    drop(mounted);
    assert!(!root.exists());
}
