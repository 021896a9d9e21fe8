//! The scrub: it reads every block from the disk, and verifies it.
//!
//! Without it, damage adds up unseen in blobs that nobody reads, until a blob has fewer good blocks
//! than it needs.
//!
//! ```text
//! begin ─► step: read the next blocks in the order of the log ─► … ─► the round is over
//!            └─► damaged, and damaged when read again ─► marked as bad
//! ```
//!
//! - **A round** covers the fragments that the table has when the round begins. Later fragments are
//!   left to the next round. The position in the log is saved now and then. After a restart the
//!   round continues there.
//! - **A bad fragment counts as missing.** No answer has it and no count includes it, so repair
//!   stores it again. Its row stays in the table, marked, and its block stays on the disk, because
//!   the fault may be in the memory or the cable of this machine. Both go when the fragment is
//!   stored again or deleted. If the table is lost, the log is scanned, and a block that can be
//!   read then is a fragment again.
//! - **Damage** is a block without its checksum, a block that the disk cannot read, or a missing
//!   part of the file. After any other error the fragment stays as it is, and the round does not
//!   count as complete.
//!
//! # Why no good fragment becomes bad
//!
//! While a fragment is in the table, no thread of this process writes or punches its block, and no
//! position is ever used twice: a deletion and a replacement remove the row first. So a read that
//! begins and ends while the row is there returns what the disk has. The row is there when the step
//! reads the table, before the block is read. The mark is set only if the row is there afterwards:
//!
//! | meanwhile | the row | so |
//! |---|---|---|
//! | the fragment is deleted, also with its segment | is gone | nothing is marked |
//! | a put replaces the damaged block | is gone, or the put is staged or pending | nothing is marked; staged: the step waits |
//! | a put finds the fragment whole and relies on it | is there, and the fragment is busy | the step waits until the put has ended |
//! | nothing | is there | it is marked, durably, with all counts in one transaction |
//!
//! The mark is set under the locks of a deletion, so no put starts to rely on the fragment and none
//! becomes known meanwhile. A crash before the mark is durable leaves the fragment as it was. The
//! Bloom filter keeps the name of a bad fragment, which costs a look into the table. A put of a bad
//! fragment is a put of a fragment that is not there: it is written, synced, and then answered.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::PeerStore;
use super::group::KnownFragment;
use super::table::ScrubRecord;
use crate::buffers::Buffer;
use crate::cluster::protocol::FragmentId;
use crate::error::Result;
use crate::sys;

/// The most bytes that a step reads, except for the last fragment.
const STEP_BYTES: u64 = 1 << 20;

/// The most fragments that a step reads. Tests have few fragments and must cover several steps.
const STEP_FRAGMENTS: usize = if cfg!(test) { 3 } else { 64 };

/// How often a block is read when the error is not damage.
const READ_ATTEMPTS: usize = 3;

/// The pause between such attempts.
const READ_PAUSE: Duration = Duration::from_secs(1);

/// How often the step looks whether the puts that rely on a damaged fragment have ended.
const BUSY_ATTEMPTS: usize = 50;

/// The pause between such looks.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// The pause between looks whether requests are being carried out.
const YIELD_PAUSE: Duration = Duration::from_millis(5);

/// Waits for a time. Returns `false` if the scrub is to stop.
pub type ScrubPause<'a> = &'a dyn Fn(Duration) -> bool;

/// Reads the pages of a block.
pub(super) type ReadBlock<'a> = &'a dyn Fn(&KnownFragment, &mut [u8]) -> io::Result<()>;

/// What the scrub has found so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubStatus {
    /// When the last complete round ended, in seconds since 1970.
    pub scrubbed: Option<u64>,
    /// All bad fragments that were ever found.
    pub bad: u64,
}

/// The progress of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubRound {
    /// When it began, in seconds since 1970.
    pub started: u64,
    /// Bytes of space of all fragments when it began.
    pub total: u64,
    /// Bytes of space of the fragments that were examined.
    pub done: u64,
    /// Whether all fragments were examined.
    pub is_over: bool,
}

/// A request that is being carried out. The scrub waits a while for it.
pub(in crate::cluster::peer) struct Serving<'a>(&'a AtomicUsize);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A fragment that is damaged, and how.
type Damaged = (KnownFragment, String);

/// What a look at a block has shown.
enum Verdict {
    Whole,
    Damaged(String),
    /// The block could not be read for another reason.
    Unread(io::Error),
}

impl PeerStore {
    /// Notes that a request is being carried out, until the result is dropped.
    pub(in crate::cluster::peer) fn serving(&self) -> Serving<'_> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Serving(&self.requests)
    }

    /// Returns what the scrub has found so far.
    pub fn scrub_status(&self) -> ScrubStatus {
        let ScrubRecord { scrubbed, bad, .. } = *self.scrub();
        ScrubStatus { scrubbed, bad }
    }

    /// Returns the round that began last; `None` if there was none.
    pub fn scrub_round(&self) -> Option<ScrubRound> {
        let record = *self.scrub();
        let ScrubRecord { total, done, place, until, .. } = record;
        record.started.map(|started| ScrubRound { started, total, done, is_over: place >= until })
    }

    /// Begins a round. `now` is in seconds since 1970.
    pub fn begin_scrub(&self, now: u64) -> Result<()> {
        let (total, until) = (self.state().used, self.table.last_place()?);
        let mut record = self.scrub();
        let ScrubRecord { scrubbed, bad, .. } = *record;
        let started = Some(now);
        *record = ScrubRecord { started, until, total, scrubbed, bad, ..ScrubRecord::default() };
        if until == 0 {
            record.scrubbed = Some(now);
        }
        drop(record);
        self.save_scrub()
    }

    /// Writes the progress to the table.
    pub fn save_scrub(&self) -> Result<()> {
        let record = *self.scrub();
        self.table.save_scrub(&record)
    }

    /// Examines the next fragments of the round. Returns the bytes of space that they take.
    /// `patience` is the time for which the step may wait for requests to end.
    pub fn scrub_step(&self, now: u64, patience: Duration, pause: ScrubPause<'_>) -> Result<u64> {
        let read = |known: &KnownFragment, buffer: &mut [u8]| self.read_from_disk(known, buffer);
        self.scrub_step_with(now, patience, pause, &read)
    }

    /// As [`PeerStore::scrub_step`], with another way to read blocks.
    pub(super) fn scrub_step_with(
        &self,
        now: u64,
        mut patience: Duration,
        pause: ScrubPause<'_>,
        read: ReadBlock<'_>,
    ) -> Result<u64> {
        let mut record = *self.scrub();
        let page = self.table.log_page(record.place, record.until, STEP_FRAGMENTS)?;
        let (mut bytes, mut unread, mut damaged) = (0, 0, Vec::new());
        let mut is_page_done = true;
        for known in page.all {
            if bytes >= STEP_BYTES || !self.yield_to_requests(&mut patience, pause) {
                is_page_done = false;
                break;
            }
            bytes += known.space();
            record.place = known.place.number();
            match self.examine(&known, pause, read) {
                Verdict::Whole => {}
                Verdict::Damaged(how) => damaged.push((known, how)),
                Verdict::Unread(error) => {
                    let file = self.files.path(known.place.segment);
                    let (file, offset) = (file.display(), known.place.offset);
                    tracing::warn!(%file, offset, %error, "the scrub cannot read a block");
                    unread += 1;
                }
            }
        }
        if is_page_done {
            record.place = page.last.unwrap_or(record.until);
        }
        unread += self.mark_bad(damaged, pause)?;
        let is_over = {
            let mut progress = self.scrub();
            progress.place = record.place;
            progress.done += bytes;
            progress.unread += unread;
            let is_over = progress.place >= progress.until;
            if is_over && progress.unread == 0 {
                progress.scrubbed = Some(now);
            }
            is_over
        };
        if is_over {
            self.save_scrub()?;
        }
        Ok(bytes)
    }

    /// Waits while requests are carried out, as long as there is patience. Returns whether to
    /// continue.
    fn yield_to_requests(&self, patience: &mut Duration, pause: ScrubPause<'_>) -> bool {
        while self.requests.load(Ordering::Relaxed) > 0 && !patience.is_zero() {
            if !pause(YIELD_PAUSE) {
                return false;
            }
            *patience = patience.saturating_sub(YIELD_PAUSE);
        }
        // A stop must not wait for the end of the step either.
        pause(Duration::ZERO)
    }

    /// Reads and verifies a block. A block that seems damaged is read twice.
    fn examine(
        &self,
        known: &KnownFragment,
        pause: ScrubPause<'_>,
        read: ReadBlock<'_>,
    ) -> Verdict {
        let len = known.description.block_len();
        let mut buffer = Buffer::new(len.next_multiple_of(crate::durable::segment::ALIGNMENT), 0);
        let (mut is_suspect, mut attempts) = (false, 0);
        loop {
            let how = match read(known, &mut buffer) {
                Ok(()) if known.description.matches(known.index.into(), &buffer[..len]) => {
                    return Verdict::Whole;
                }
                Ok(()) => "it does not have its checksum".to_owned(),
                Err(error) if self.is_damage(&error) => error.to_string(),
                Err(error) => {
                    attempts += 1;
                    if attempts >= READ_ATTEMPTS || !pause(READ_PAUSE) {
                        return Verdict::Unread(error);
                    }
                    continue;
                }
            };
            if is_suspect {
                return Verdict::Damaged(how);
            }
            is_suspect = true;
        }
    }

    /// Whether an error says that the disk has lost the block. Other errors may pass.
    fn is_damage(&self, error: &io::Error) -> bool {
        match error.kind() {
            // The file is shorter than the table says.
            io::ErrorKind::UnexpectedEof => true,
            // The segment is missing. But if another directory is there, because a file system was
            // unmounted, that says nothing about the disk.
            io::ErrorKind::NotFound => self.is_own_directory(),
            // Direct I/O reports an unreadable sector as ENODATA.
            _ => matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODATA)),
        }
    }

    /// Whether the directory at the path of the data directory is the one that this process locked.
    fn is_own_directory(&self) -> bool {
        let at_path = fs::metadata(self.directory.join("lock"));
        let inode = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        matches!(
            (at_path.map(inode), self._lock.metadata().map(inode)),
            (Ok(at_path), Ok(locked)) if at_path == locked
        )
    }

    /// Reads the pages of a block from the disk, not from the page cache, when the disk is idle.
    pub(super) fn read_from_disk(
        &self,
        known: &KnownFragment,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        // Not for the whole thread: a request may wait for what it writes to the table.
        let _idle = sys::IdleIoPriority::set();
        let (path, offset) = (self.files.path(known.place.segment), known.place.offset);
        let mut options = File::options();
        options.read(true);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        match direct.and_then(|file| file.read_exact_at(buffer, offset)) {
            // The file system has no direct I/O, or wants another alignment.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let file = options.open(&path)?;
                sys::drop_cached(&file, offset..known.end())?;
                file.read_exact_at(buffer, offset)?;
                sys::drop_cached(&file, offset..known.end())
            }
            read => read,
        }
    }

    /// Marks damaged fragments as bad, unless they are gone. Returns the number of those that it
    /// could not mark, because puts continue to rely on them.
    fn mark_bad(&self, mut damaged: Vec<Damaged>, pause: ScrubPause<'_>) -> Result<u64> {
        for _ in 0..BUSY_ATTEMPTS {
            if damaged.is_empty() {
                return Ok(0);
            }
            damaged = self.mark_idle_bad(damaged)?;
            if !damaged.is_empty() && !pause(BUSY_PAUSE) {
                break;
            }
        }
        Ok(damaged.len() as u64)
    }

    /// Marks as bad the damaged fragments that no put relies on. Returns the others.
    fn mark_idle_bad(&self, damaged: Vec<Damaged>) -> Result<Vec<Damaged>> {
        // As for a deletion: with both locks held, no fragment becomes known and no put starts to
        // rely on one.
        let _flushing = self.flushing.lock().expect("no thread panics during a flush");
        let _log = self.log();
        self.settle(false)?;
        let (busy, mut idle): (Vec<_>, Vec<_>) = {
            let state = self.state();
            damaged.into_iter().partition(|(one, _)| {
                let (blob, encoding) = (one.description.blob, one.description.id());
                state.busy.contains_key(&FragmentId { blob, encoding, index: one.index })
                    || state.pending.contains(&blob, &encoding, one.index)
            })
        };
        let places: Vec<_> = idle.iter().map(|(one, _)| one.place).collect();
        let marked = self.table.mark_bad(&places)?;
        idle.retain(|(one, _)| marked.contains(&one.place));
        let bad: Vec<_> = idle.iter().map(|(one, _)| one.clone()).collect();
        self.uncount(&bad);
        self.scrub().bad += bad.len() as u64;
        for (one, how) in &idle {
            let (blob, index, offset) = (one.description.blob, one.index, one.place.offset);
            let file = self.files.path(one.place.segment);
            let file = file.display();
            tracing::error!(
                %blob, index, %file, offset, how,
                "found a bad fragment; it counts as missing until repair stores it again"
            );
        }
        Ok(busy)
    }

    fn scrub(&self) -> MutexGuard<'_, ScrubRecord> {
        self.scrub.lock().expect("no thread panics with the scrub's progress locked")
    }
}
