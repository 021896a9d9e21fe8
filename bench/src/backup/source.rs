//! The disk image that is stored: its content, and the change between the two versions.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use anyhow::{Context, Result, ensure};
use seeded_rng::Rng;

/// The length of the ranges that change between the versions, and of the parts in which the content
/// is made.
const RANGE: usize = 64 << 10;
/// A change of one in so many ranges.
const CHANGE: u64 = 100;
/// The words of the part that can be compressed.
const WORDS: usize = 4096;

/// A raw disk image. Half of it cannot be compressed. The other half is text of random words.
pub(crate) struct Source {
    path: PathBuf,
    file: File,
    size: u64,
    rng: Rng,
    words: Vec<String>,
}

impl Source {
    /// Creates an image of `size` bytes, a multiple of [`RANGE`].
    pub(crate) fn create(path: &Path, size: u64) -> Result<Source> {
        let doing = || format!("creating {}", path.display());
        let mut rng = Rng::new(0xbac0);
        let words = (0..WORDS).map(|_| word(&mut rng)).collect();
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = file.with_context(doing)?;
        let mut source = Source { path: path.to_owned(), file, size, rng, words };
        let mut out = BufWriter::new(source.file.try_clone()?);
        for _ in 0..size / RANGE as u64 {
            out.write_all(&source.content()).with_context(doing)?;
        }
        out.flush().with_context(doing)?;
        Ok(source)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the next version: overwrites 1 % of the image in ranges at random places.
    pub(crate) fn change(&mut self) -> Result<()> {
        let ranges = self.size / RANGE as u64;
        for _ in 0..ranges.div_ceil(CHANGE) {
            let at = self.rng.below(ranges) * RANGE as u64;
            let content = self.content();
            self.file.write_all_at(&content, at).context("changing the image")?;
        }
        Ok(())
    }

    /// Reads the image, so that it is in the page cache.
    pub(crate) fn warm_up(&self) -> Result<()> {
        let mut file = File::open(&self.path)?;
        io::copy(&mut file, &mut io::sink()).context("reading the image")?;
        Ok(())
    }

    /// Compares the output of a process with the image, and waits for its end.
    pub(crate) fn compare(&self, process: Result<Child>) -> Result<()> {
        let mut process = process?;
        let mut output = process.stdout.take().context("the output of the process is no pipe")?;
        let (mut wanted, mut found) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for at in (0..self.size).step_by(wanted.len()) {
            output.read_exact(&mut found).context("reading the stored version")?;
            self.file.read_exact_at(&mut wanted, at).context("reading the image")?;
            ensure!(wanted == found, "the stored version differs from the image behind byte {at}");
        }
        ensure!(output.read(&mut found)? == 0, "the stored version is longer than the image");
        let status = process.wait().context("waiting for the end of the process")?;
        ensure!(status.success(), "the process ended with {status}");
        Ok(())
    }

    /// The content of a range: bytes that cannot be compressed, or text.
    fn content(&mut self) -> Vec<u8> {
        let mut content = Vec::with_capacity(RANGE + 16);
        if self.rng.chance(50) {
            content.resize(RANGE, 0);
            self.rng.fill(&mut content);
            return content;
        }
        while content.len() < RANGE {
            let word = &self.words[self.rng.below(WORDS as u64) as usize];
            content.extend_from_slice(word.as_bytes());
        }
        content.truncate(RANGE);
        content
    }
}

/// A word of 2 to 12 letters, and a space.
fn word(rng: &mut Rng) -> String {
    let len = rng.between(2, 12);
    let letters = (0..len).map(|_| char::from(b'a' + rng.below(26) as u8));
    letters.chain([' ']).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Command, Stdio};

    use super::{CHANGE, RANGE, Source};

    #[test]
    fn one_percent_of_the_ranges_changes_and_a_wrong_copy_is_found() {
        let path = std::env::temp_dir().join(format!("cairn-bench-source-{}", std::process::id()));
        let size = 4 * CHANGE * RANGE as u64;
        let mut source = Source::create(&path, size).unwrap();
        let before = fs::read(&path).unwrap();
        let read = || Command::new("cat").arg(&path).stdout(Stdio::piped()).spawn();
        source.compare(Ok(read().unwrap())).unwrap();
        source.change().unwrap();
        let after = fs::read(&path).unwrap();
        let ranges = before.chunks(RANGE).zip(after.chunks(RANGE));
        let changed = ranges.filter(|(one, other)| one != other).count();
        assert!((1..=4).contains(&changed), "{changed} ranges have changed");

        let old = path.with_extension("old");
        fs::write(&old, &before).unwrap();
        let read_old = Command::new("cat").arg(&old).stdout(Stdio::piped()).spawn();
        let error = source.compare(Ok(read_old.unwrap())).unwrap_err().to_string();
        assert!(error.contains("differs"), "{error}");
        for file in [&path, &old] {
            fs::remove_file(file).unwrap();
        }
    }
}
