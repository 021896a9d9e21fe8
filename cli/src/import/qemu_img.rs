//! Converts disk images of other formats to raw ones, with `qemu-img`.
//!
//! | what an image could do | why it cannot |
//! |---|---|
//! | name a file of the host, whose content would be imported | it is refused: [`check_references`], and what `qemu-img info` reports |
//! | name such a file for a moment, while it is converted | it must not change meanwhile |
//! | be cut off, and read as zeros there | `qemu-img check` and `qemu-img map` come first |
//! | be taken for another format than the one that was checked | `qemu-img` is told the format |
//! | have a name that `qemu-img` takes for a network address | it gets the open file, not its name |
//! | be raw, with content that looks like another format | it is recognised and said; `--format raw` |
//! | leave its raw copy behind | the copy never has a name |

use std::env;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::image_format::{FOOTER, Format, HEADER, VMDK_DESCRIPTOR, check_references};
use crate::progress::Activity;

/// The name of the image for `qemu-img`: its standard input.
const SOURCE: &str = "/dev/stdin";

/// The name of the raw copy for `qemu-img`.
const COPY: &str = "/dev/stdout";

/// The interval between two looks at the progress.
const INTERVAL: Duration = Duration::from_millis(50);

/// The format of a file, which is recognised unless it is given.
pub(crate) fn format_of(
    file: &File,
    given: Option<Format>,
    doing: &impl Fn() -> String,
) -> Outcome<Format> {
    match given {
        Some(format) => Ok(format),
        None => {
            let header = read_some(file, 0, HEADER).doing(doing)?;
            let len = file.metadata().doing(doing)?.len();
            let footer = match len.checked_sub(FOOTER as u64) {
                Some(at) => read_some(file, at, FOOTER).doing(doing)?,
                None => Vec::new(),
            };
            recognised(Format::of_file(&header, &footer), doing)
        }
    }
}

/// The format of a stream that begins with these bytes.
pub(crate) fn format_of_stream(header: &[u8], doing: &impl Fn() -> String) -> Outcome<Format> {
    recognised(Format::of(header), doing)
}

fn recognised(found: Result<Format, &str>, doing: &impl Fn() -> String) -> Outcome<Format> {
    found.map_err(|what| {
        let why = format!(
            "it looks like {what}, which cannot be imported; convert it with `qemu-img convert -O \
             raw` and import the result, or use --format raw if it is the content of a raw disk"
        );
        Failure::new(Exit::Usage, doing(), why)
    })
}

/// The first bytes from an offset on, as far as the file has them.
fn read_some(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while done < len {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// Converts an image to a raw file that has no name. `check_size` says whether a disk may have this
/// size.
pub(crate) fn to_raw(
    source: &File,
    format: Format,
    check_size: impl FnOnce(u64) -> Outcome,
    style: Style,
    doing: &impl Fn() -> String,
) -> Outcome<File> {
    let refuse = |why: &str| {
        let why = format!(
            "{why}; convert it with `qemu-img convert` on a machine where you trust it, and import \
             the result"
        );
        Err(Failure::new(Exit::Usage, doing(), why))
    };
    let before = source.metadata().doing(doing)?;
    let references = || -> Outcome<Result<(), &str>> {
        let header = read_some(source, 0, HEADER).doing(doing)?;
        let descriptor = read_some(source, VMDK_DESCRIPTOR.0, VMDK_DESCRIPTOR.1).doing(doing)?;
        Ok(check_references(format, &header, &descriptor))
    };
    if let Err(why) = references()? {
        return refuse(why);
    }
    let mut info =
        qemu_img(&["info", "--output=json", "-f", format.name(), SOURCE], source, doing)?;
    let info = info.stdout(Stdio::piped()).stderr(Stdio::piped()).output();
    let info = parsed(&succeeded(info, doing)?, doing)?;
    if let Some(why) = reference_of(&info) {
        return refuse(&why);
    }
    let size = info["virtual-size"].as_u64().unwrap_or(0);
    check_size(size)?;
    check(source, format, doing)?;
    check_data(source, format, doing)?;

    let directory = directory();
    let copy = unnamed_file(&directory)
        .doing(|| format!("{}: creating a temporary file in {}", doing(), directory.display()))?;
    copy.set_len(size).doing(doing)?;
    if !style.json {
        let (format, size) = (format.name(), style.size(size));
        eprintln!("note: the source is a {format} image of a disk of {size}; converting it");
    }
    // The copy is zeros at first, so that only data is written.
    let args = ["convert", "-n", "--target-is-zero", "-W", "-f", format.name(), "-O", "raw"];
    let mut convert = qemu_img(&[&args[..], &[SOURCE, COPY]].concat(), source, doing)?;
    convert.stdout(copy.try_clone().doing(doing)?).stderr(Stdio::piped());
    let converted = run(convert, &copy, style);
    succeeded(converted, doing).map_err(|failure| {
        let place = directory.display();
        failure.and(format!("the raw copy is in {place}, or in TMPDIR if that is set"))
    })?;
    // Who can change the image meanwhile could have named a file of the host for a moment. The time of a
    // change may be the same within one tick of the clock; then the file still names the other one.
    if is_changed(&before, &source.metadata().doing(doing)?) || references()?.is_err() {
        let why =
            "the image was changed while it was converted; import it when nobody writes to it";
        return Err(Failure::new(Exit::Conflict, doing(), why));
    }
    Ok(copy)
}

/// Whether a file was written between two looks at it.
fn is_changed(before: &Metadata, after: &Metadata) -> bool {
    let state = |one: &Metadata| (one.len(), one.ctime(), one.ctime_nsec());
    state(before) != state(after)
}

/// Fails if data of the image is behind the end of its file. `qemu-img check` tolerates that within the
/// last cluster.
fn check_data(source: &File, format: Format, doing: &impl Fn() -> String) -> Outcome {
    let metadata = source.metadata().doing(doing)?;
    if !metadata.is_file() {
        // A device is as long as it is.
        return Ok(());
    }
    let len = metadata.len();
    let mut map = qemu_img(&["map", "--output=json", "-f", format.name(), SOURCE], source, doing)?;
    let mut map = map.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().doing(doing)?;
    let lines = BufReader::new(map.stdout.take().expect("it is piped")).lines();
    let mut is_cut = false;
    for line in lines {
        // One element of an array on each line.
        let line = line.doing(doing)?;
        let element = line.trim_matches(['[', ']', ',', ' ']);
        let Ok(one) = serde_json::from_str::<Value>(element) else { continue };
        let has_data = one["data"] == true && one["zero"] != true;
        if let (true, Some(offset), Some(length)) =
            (has_data, one["offset"].as_u64(), one["length"].as_u64())
        {
            is_cut |= offset.saturating_add(length) > len;
        }
    }
    let mapped = map.wait().doing(doing)?;
    if mapped.success() && !is_cut {
        return Ok(());
    }
    let why = match is_cut {
        true => "the image is cut off: some of its data is behind the end of the file".to_owned(),
        false => format!("qemu-img map failed ({mapped})"),
    };
    Err(Failure::new(Exit::Failure, doing(), why))
}

/// Fails if the image is damaged. A conversion reads what is missing at the end of a file as zeros.
fn check(source: &File, format: Format, doing: &impl Fn() -> String) -> Outcome {
    /// Exit codes that say that the disk is intact: no error; unused space; no check for the format.
    const INTACT: [Option<i32>; 3] = [Some(0), Some(3), Some(63)];
    let mut check = qemu_img(&["check", "-f", format.name(), SOURCE], source, doing)?;
    // A damaged image may lead to an unbounded number of messages.
    let status = check.stdout(Stdio::null()).stderr(Stdio::null()).status().doing(doing)?;
    if INTACT.contains(&status.code()) {
        return Ok(());
    }
    let why = format!(
        "the image is damaged or incomplete: `qemu-img check -f {}` says what is wrong",
        format.name()
    );
    Err(Failure::new(Exit::Failure, doing(), why))
}

/// Runs the conversion, and shows how much it has written.
fn run(mut command: Command, copy: &File, style: Style) -> io::Result<Output> {
    let child = command.spawn()?;
    let activity = Activity::new();
    thread::scope(|scope| {
        let ended = scope.spawn(|| child.wait_with_output());
        while !ended.is_finished() {
            let written = copy.metadata().map_or(0, |metadata| metadata.blocks() * 512);
            activity.set(|| format!("converting with qemu-img, {}", style.size(written)));
            thread::sleep(INTERVAL);
        }
        ended.join().expect("waiting does not panic")
    })
}

fn qemu_img(args: &[&str], source: &File, doing: &impl Fn() -> String) -> Outcome<Command> {
    let mut source = source.try_clone().doing(doing)?;
    source.rewind().doing(doing)?;
    let mut command = Command::new("qemu-img");
    command.args(args).stdin(source);
    Ok(command)
}

fn succeeded(run: io::Result<Output>, doing: &impl Fn() -> String) -> Outcome<Vec<u8>> {
    let output = match run {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let why = "the image is not raw, and the program qemu-img, which converts it, is not \
                       installed: install the package qemu-utils (Debian, Ubuntu), qemu-img \
                       (Fedora, RHEL) or qemu-tools (SUSE)";
            return Err(Failure::new(Exit::Failure, doing(), why));
        }
        run => run.doing(doing)?,
    };
    if output.status.success() {
        return Ok(output.stdout);
    }
    let mut text = String::new();
    // A bound for what is printed.
    let _ = output.stderr.take(4096).read_to_string(&mut text);
    let text = text.trim().replace(SOURCE, "the image").replace(COPY, "the raw copy");
    let exit = match text.contains("No space left") {
        true => Exit::Unavailable,
        false => Exit::Failure,
    };
    Err(Failure::new(exit, doing(), format!("qemu-img failed ({}): {text}", output.status)))
}

fn parsed(json: &[u8], doing: &impl Fn() -> String) -> Outcome<Value> {
    serde_json::from_slice(json).map_err(|error| {
        let why = format!("qemu-img has printed no valid description of the image: {error}");
        Failure::new(Exit::Failure, doing(), why)
    })
}

/// What an image refers to besides itself, according to `qemu-img info`.
fn reference_of(info: &Value) -> Option<String> {
    for field in ["backing-filename", "full-backing-filename"] {
        if let Some(name) = info[field].as_str() {
            return Some(format!("it has a backing file, {name:?}"));
        }
    }
    let data = &info["format-specific"]["data"];
    if let Some(name) = data["data-file"].as_str() {
        return Some(format!("its data is in another file, {name:?}"));
    }
    let extents = data["extents"].as_array().into_iter().flatten();
    let mut names = extents.filter_map(|extent| extent["filename"].as_str());
    if let Some(name) = names.find(|name| *name != SOURCE) {
        return Some(format!("its data is in another file, {name:?}"));
    }
    (info["encrypted"] == true).then(|| "it is encrypted".into())
}

/// The directory for the raw copy. Many systems have `/tmp` in memory.
fn directory() -> PathBuf {
    match env::var_os("TMPDIR") {
        Some(directory) if !directory.is_empty() => directory.into(),
        _ => "/var/tmp".into(),
    }
}

/// A file without a name. It is gone when its last user ends, however that happens.
fn unnamed_file(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(directory)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::reference_of;

    #[test]
    fn what_an_image_refers_to_is_found() {
        let refused = [
            json!({ "backing-filename": "/etc/passwd" }),
            json!({ "full-backing-filename": "nbd://host" }),
            json!({ "format-specific": { "data": { "data-file": "/dev/sda" } } }),
            json!({ "format-specific": { "data": { "extents": [
                { "filename": "/dev/stdin" }, { "filename": "/etc/shadow" }
            ] } } }),
            json!({ "encrypted": true }),
        ];
        for info in refused {
            assert!(reference_of(&info).is_some(), "{info}");
        }
        let extents = json!([{ "filename": "/dev/stdin" }]);
        let info =
            json!({ "virtual-size": 1, "format-specific": { "data": { "extents": extents } } });
        assert_eq!(reference_of(&info), None);
    }
}
