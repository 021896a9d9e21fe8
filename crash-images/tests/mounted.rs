//! The directory that records does what a directory does, and forgets what a power cut may take.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::Path;

use crash_images::{Draw, Mounted, check_all};

const BLOCK: usize = 4096;

/// Memory that direct I/O can use.
#[repr(align(4096))]
struct Aligned([u8; BLOCK]);

fn said(marks: &[String], text: &str) -> bool {
    marks.iter().any(|mark| mark == text)
}

#[test]
fn only_what_was_synced_is_sure_to_be_left() {
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
    assert!(File::open(&last).unwrap().try_lock().is_err(), "it is locked");

    let (mut lost, mut torn) = (false, false);
    let seen = std::sync::Mutex::new((&mut lost, &mut torn));
    let check = |image: &Path, marks: &[String]| {
        let named = ["d/last", "d/first"].map(|name| fs::read(image.join(name)).ok());
        assert!(named.iter().flatten().count() <= 1, "a rename by half");
        assert!(!said(marks, "named") || named[0].is_some(), "the name is lost");
        let is_link = fs::read_link(image.join("d/link")).is_ok();
        assert!(!said(marks, "named") || is_link, "the link is lost");
        let mut seen = seen.lock().unwrap();
        let Some(bytes) = named.into_iter().flatten().next() else { return *seen.0 = true };
        if said(marks, "synced") {
            assert!(bytes[..BLOCK] == [1; BLOCK], "what was synced is lost");
        } else if said(marks, "written") {
            *seen.1 |= bytes.contains(&0);
        }
        if said(marks, "written through") && bytes.len() > BLOCK {
            assert!(bytes[BLOCK..] == [2; BLOCK], "what was written through is lost");
        }
    };
    let draw = Draw { seed: 1, images: 16, atom: 512 };
    let images = check_all(&mounted.recording(), draw, check).unwrap_or_else(|one| panic!("{one}"));
    assert!(images > 20 && lost && torn, "{images} images, lost: {lost}, torn: {torn}");
}

#[test]
fn a_directory_that_is_not_needed_any_more_is_unmounted_though_it_is_in_use() {
    let mounted = Mounted::new();
    let root = mounted.root().to_owned();
    let _open = File::create(root.join("file")).unwrap();
    drop(mounted);
    assert!(!root.exists());
}
