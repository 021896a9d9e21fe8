//! Importing disks of other formats, with the `qemu-img` of this machine.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;
use std::time::Instant;

use crate::support::{Place, Run};

fn qemu_img(place: &Place, args: &[&str]) {
    let output = Command::new("qemu-img").args(args).current_dir(place.dir.path()).output();
    let output = output.expect("qemu-img is in the package qemu-utils");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Refused imports print no content of other files, and leave no image.
fn assert_refused(place: &Place, args: &[&str], code: i32, why: &str) {
    let run = place.run(args);
    assert_eq!(run.code, code, "{args:?}: {}", run.stderr);
    assert!(run.stderr.contains(why), "{args:?}: {}", run.stderr);
    assert_eq!(place.run(&["show", args[2]]).code, 3);
}

#[test]
fn disks_of_all_formats_are_recognised_by_their_content() {
    let place = Place::new();
    let disk = place.disk("in.raw");
    place.ok(&["import", "in.raw", "raw"]);
    let root = place.json(&["show", "raw"])["root"].clone();
    let compressed = ["-c", "-O", "qcow2"];
    for (name, args) in [
        ("qcow2", &["-O", "qcow2"][..]),
        ("qcow2-old", &["-O", "qcow2", "-o", "compat=0.10"]),
        ("qcow2-compressed", &compressed),
        ("vmdk", &["-O", "vmdk"]),
        ("vmdk-stream", &["-O", "vmdk", "-o", "subformat=streamOptimized"]),
        ("vhdx", &["-O", "vhdx"]),
        ("vhdx-fixed", &["-O", "vhdx", "-o", "subformat=fixed"]),
    ] {
        // The name says nothing, or something wrong.
        let file = format!("nbd:{name}.raw");
        qemu_img(&place, &[&["convert", "-f", "raw", "in.raw"], args, &["to"]].concat());
        fs::rename(place.path("to"), place.path(&file)).unwrap();
        let run = place.run(&["import", &file, name]);
        assert_eq!(run.code, 0, "{name}: {}", run.stderr);
        assert!(run.stderr.contains("image of a disk of 3 MiB"), "{name}: {}", run.stderr);
        assert_eq!(place.json(&["show", name])["root"], root, "{name}");
        let format = name.split('-').next().unwrap();
        place.ok(&["import", &file, &format!("{name}2"), "--format", format]);
        place.ok(&["export", name, "out.raw", "--force"]);
        assert!(fs::read(place.path("out.raw")).unwrap() == disk, "{name}");
    }
}

#[test]
fn a_large_disk_with_little_data_is_imported_quickly_and_leaves_no_copy() {
    let place = Place::new();
    qemu_img(&place, &["create", "-f", "qcow2", "large.qcow2", "500G"]);
    qemu_img(&place, &["create", "-f", "qcow2", "small.qcow2", "1000"]);
    fs::create_dir(place.path("tmp")).unwrap();
    let import = |file: &str, image: &str| -> Run {
        place.command(&["import", file, image]).env("TMPDIR", "tmp").output().unwrap().into()
    };
    let begin = Instant::now();
    let run = import("large.qcow2", "large");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(begin.elapsed().as_secs() < 30, "{:?}", begin.elapsed());
    assert_eq!(place.json(&["show", "large"])["size"], 500_u64 << 30);
    assert_eq!(fs::read_dir(place.path("tmp")).unwrap().count(), 0);
    assert_eq!(import("small.qcow2", "small").code, 0);
    assert_eq!(place.json(&["show", "small"])["size"], 1024);
    fs::remove_dir(place.path("tmp")).unwrap();
    let run = import("small.qcow2", "none");
    assert_eq!(run.code, 3, "{}", run.stderr);
    assert!(run.stderr.contains("a temporary file in tmp"), "{}", run.stderr);
}

#[test]
fn an_image_that_names_another_file_is_refused() {
    let place = Place::new();
    place.disk("secret.raw");
    let secret = place.path("secret.raw");
    let secret = secret.to_str().unwrap();
    let create = |format: &str, name: &str, more: &[&str]| {
        let create = ["create", "-q", "-f", format];
        qemu_img(&place, &[&create, more, &[name, "3M"]].concat());
    };
    create("qcow2", "backing.qcow2", &["-b", secret, "-F", "raw"]);
    create("qcow2", "old-backing.qcow2", &["-o", "compat=0.10", "-b", secret, "-F", "raw"]);
    let external = format!("data_file={secret}2,data_file_raw=on");
    create("qcow2", "external.qcow2", &["-o", &external]);
    create("vmdk", "base.vmdk", &[]);
    create("vmdk", "backing.vmdk", &["-b", "base.vmdk", "-F", "vmdk"]);
    create("vmdk", "flat.vmdk", &["-o", "subformat=monolithicFlat"]);
    create("vmdk", "twogb.vmdk", &["-o", "subformat=twoGbMaxExtentSparse"]);
    for (name, why) in [
        ("backing.qcow2", "backing file"),
        ("old-backing.qcow2", "backing file"),
        ("external.qcow2", "in another file"),
        ("backing.vmdk", "backing file"),
        ("flat.vmdk", "in other files"),
        ("twogb.vmdk", "in other files"),
    ] {
        assert_refused(&place, &["import", name, "vm1"], 2, why);
    }
    // Said to be VMDK, a descriptor is refused too.
    let given = ["import", "flat.vmdk", "vm1", "--format", "vmdk"];
    assert_refused(&place, &given, 2, "given format");
}

/// A VMDK file whose header says that a descriptor inside tells where the data is.
#[test]
fn a_descriptor_inside_an_image_cannot_name_files() {
    let place = Place::new();
    place.disk("in.raw");
    qemu_img(&place, &["convert", "-f", "raw", "-O", "vmdk", "in.raw", "evil.vmdk"]);
    let file = fs::OpenOptions::new().write(true).open(place.path("evil.vmdk")).unwrap();
    file.write_all_at(&[0; 8], 12).unwrap();
    let text = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
                createType=\"monolithicFlat\"\nRW 6144 FLAT \"/etc/passwd\" 0\n\0";
    file.write_all_at(text.as_bytes(), 512).unwrap();
    assert_refused(&place, &["import", "evil.vmdk", "vm1"], 2, "in other files");
}

#[test]
fn formats_that_cannot_be_imported_are_named() {
    let place = Place::new();
    place.disk("in.raw");
    for (format, options, why) in [
        ("vpc", "subformat=dynamic", "a VHD image"),
        ("vpc", "subformat=fixed", "a VHD image of fixed size"),
        ("vdi", "static=off", "a VDI image"),
        ("qed", "cluster_size=65536", "a QED image"),
    ] {
        let convert = ["convert", "-f", "raw", "-O", format, "-o", options, "in.raw", "other"];
        qemu_img(&place, &convert);
        assert_refused(&place, &["import", "other", "vm1"], 2, why);
    }
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "luks.qcow2", "1M"]);
    let file = fs::OpenOptions::new().write(true).open(place.path("luks.qcow2")).unwrap();
    // The method of encryption in the header: LUKS.
    file.write_all_at(&[0, 0, 0, 2], 32).unwrap();
    assert_refused(&place, &["import", "luks.qcow2", "vm1"], 2, "encrypted");
}

#[test]
fn a_raw_disk_may_look_like_anything() {
    let place = Place::new();
    place.disk("in.raw");
    qemu_img(&place, &["convert", "-f", "raw", "-O", "qcow2", "in.raw", "in.qcow2"]);
    let disk = fs::read(place.path("in.qcow2")).unwrap();
    assert_eq!(disk.len() % 512, 0);
    place.ok(&["import", "in.qcow2", "file", "--format", "raw"]);
    let run = place.run_with_input(&["import", "-", "stream", "--format", "raw"], &disk);
    assert_eq!(run.code, 0, "{}", run.stderr);
    for image in ["file", "stream"] {
        place.ok(&["export", image, "out.raw", "--force"]);
        assert!(fs::read(place.path("out.raw")).unwrap() == disk, "{image}");
    }
    for args in [&["import", "-", "vm1"][..], &["import", "-", "vm1", "--format", "vhdx"]] {
        let run = place.run_with_input(args, &disk);
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.contains("a stream must be raw"), "{}", run.stderr);
    }
}

#[test]
fn a_missing_qemu_img_is_named_with_its_package() {
    let place = Place::new();
    place.disk("in.raw");
    qemu_img(&place, &["convert", "-f", "raw", "-O", "qcow2", "in.raw", "in.qcow2"]);
    let import = |file: &str| -> Run {
        place.command(&["import", file, "vm1"]).env("PATH", "/nowhere").output().unwrap().into()
    };
    let run = import("in.qcow2");
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("qemu-utils (Debian"), "{}", run.stderr);
    assert_eq!(import("in.raw").code, 0, "a raw disk needs no qemu-img");
}

/// Somebody who can write to the image lets it name a file of the host while `qemu-img` reads it.
#[test]
fn an_image_that_changes_while_it_is_converted_is_refused() {
    let place = Place::new();
    place.disk("in.raw");
    qemu_img(&place, &["convert", "-f", "raw", "-O", "qcow2", "in.raw", "in.qcow2"]);
    let real = Command::new("sh").args(["-c", "command -v qemu-img"]).output().unwrap();
    let real = String::from_utf8(real.stdout).unwrap();
    fs::create_dir(place.path("bin")).unwrap();
    let script = format!(
        "#!/bin/sh\n[ $1 = convert ] && printf '' | dd of={} conv=notrunc 2>/dev/null && touch {}\n\
         exec {} \"$@\"\n",
        place.path("in.qcow2").display(),
        place.path("in.qcow2").display(),
        real.trim()
    );
    fs::write(place.path("bin/qemu-img"), script).unwrap();
    fs::set_permissions(place.path("bin/qemu-img"), PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    let import = place.command(&["import", "in.qcow2", "vm1"]).env("PATH", path).output();
    let run: Run = import.unwrap().into();
    assert!(run.code == 4 && run.stderr.contains("was changed while"), "{}", run.stderr);
    assert_eq!(place.run(&["show", "vm1"]).code, 3);
    place.ok(&["import", "in.qcow2", "vm1"]);
}

#[test]
fn a_damaged_image_leaves_no_image_in_the_repository() {
    let place = Place::new();
    place.disk("in.raw");
    qemu_img(&place, &["convert", "-f", "raw", "-O", "qcow2", "in.raw", "in.qcow2"]);
    let whole = fs::read(place.path("in.qcow2")).unwrap();
    for len in [8, 80, 512, 70_000, whole.len() - 65_536] {
        fs::write(place.path("cut.qcow2"), &whole[..len]).unwrap();
        let run = place.run(&["import", "cut.qcow2", "vm1"]);
        assert!([1, 2].contains(&run.code), "{len}: {}", run.stderr);
        assert!(!run.stderr.contains("/dev/std"), "{len}: {}", run.stderr);
        assert_eq!(place.run(&["show", "vm1"]).code, 3);
    }
    // `qemu-img check` tolerates what is missing of the last cluster.
    for format in ["qcow2", "vmdk"] {
        qemu_img(&place, &["convert", "-f", "raw", "-O", format, "in.raw", "in.other"]);
        let whole = fs::read(place.path("in.other")).unwrap();
        for missing in [1, 4096, 61_440] {
            fs::write(place.path("cut.other"), &whole[..whole.len() - missing]).unwrap();
            assert_refused(&place, &["import", "cut.other", "vm1"], 1, "cut off");
        }
    }
    // A disk that is too large for a repository is refused before it is converted.
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "huge.qcow2", "100T"]);
    assert_refused(&place, &["import", "huge.qcow2", "vm1"], 2, "64 TiB");
}
