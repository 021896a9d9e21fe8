//! Creates and checks disk images on the host.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use seeded_rng::Rng;

/// Creates an empty disk of `size` bytes.
pub fn blank(path: &Path, size: u64) -> Result<()> {
    File::create(path)?.set_len(size)?;
    Ok(())
}

/// Creates an ext4 file system of `size` bytes with the content of the directory `content`.
pub fn ext4(path: &Path, size: u64, content: &Path) -> Result<()> {
    blank(path, size)?;
    // Without these options the kernel would initialise parts of the file system later, at any
    // time.
    tool(
        "mke2fs",
        ["-q", "-t", "ext4", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-d"]
            .map(OsStr::new)
            .into_iter()
            .chain([content.as_os_str(), path.as_os_str()]),
    )?;
    Ok(())
}

/// Fills the directory with `count` files of 1 MiB, `data/00`, `data/01`, …
///
/// Their content is random, so it neither compresses nor repeats. It is the same every time.
pub fn fill(directory: &Path, count: u64) -> Result<()> {
    const MIB: usize = 1 << 20;
    let data = directory.join("data");
    fs::create_dir_all(&data)?;
    for index in 0..count {
        let mut content = vec![0; MIB];
        Rng::new(index).fill(&mut content);
        fs::write(data.join(format!("{index:02}")), content)?;
    }
    Ok(())
}

/// Fails unless the file system is clean and its journal is empty.
pub fn check_clean(image: &Path) -> Result<()> {
    let output = tool("e2fsck", [OsStr::new("-fn"), image.as_os_str()])?;
    // With -n, e2fsck does not replay a journal that is not empty, and prints a message.
    let text = format!("{output:?}");
    ensure!(
        !text.contains("skipping journal recovery"),
        "the journal of {} needs a replay",
        image.display()
    );
    Ok(())
}

/// Replays the journal of an image, as after a power cut. Fails if the file system needs other
/// repairs.
pub fn recover(image: &Path) -> Result<()> {
    // e2fsck replays the journal before its check, which must find nothing.
    run("e2fsck", [OsStr::new("-p"), image.as_os_str()], &[0, 1])?;
    check_clean(image)
}

/// The content of the file `name` in an image.
pub fn read(image: &Path, name: &str) -> Result<Vec<u8>> {
    let request = format!("cat {name}");
    let output = tool("debugfs", [OsStr::new("-R"), OsStr::new(&request), image.as_os_str()])?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(!errors.contains("not found"), "{}: {errors}", image.display());
    Ok(output.stdout)
}

fn tool<A: AsRef<OsStr>>(name: &str, arguments: impl IntoIterator<Item = A>) -> Result<Output> {
    run(name, arguments, &[0])
}

fn run<A: AsRef<OsStr>>(
    name: &str,
    arguments: impl IntoIterator<Item = A>,
    good: &[i32],
) -> Result<Output> {
    // The directories of administration commands are not in every PATH.
    let program = ["/usr/sbin", "/sbin"]
        .iter()
        .map(|directory| Path::new(directory).join(name))
        .find(|path| path.exists())
        .unwrap_or_else(|| name.into());
    let output = Command::new(&program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {name}: `make setup` installs it"))?;
    ensure!(
        output.status.code().is_some_and(|code| good.contains(&code)),
        "{name} ended with {}:\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output)
}
