//! A scan on the server: many documents, as of one moment, in several answers.
//!
//! ```text
//! a thread: one read transaction ──► page ──► channel of one page ──► answers to be sent: two
//!     └─ waits when the channel is full           └─ waits until one of the two is sent
//! ```
//!
//! The transaction keeps the database's log from being reset, and the log grows meanwhile. So a
//! client that reads too slowly, or a scan that takes too long, is ended. Scans have threads of
//! their own: they do not occupy those of other requests.
//!
//! The number of scans bounds the memory of their pages. So a scan runs until its pages are sent.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::wire::{Answer, document_len};
use crate::documents::{Document, Query, SqliteDocuments};
use crate::error::{Error, ErrorKind, Result};

/// Scans at a time. Further ones wait.
pub(super) const MAX_SCANS: usize = 8;

/// A page is sent when it has this many bytes.
const PAGE_BYTES: usize = 256 << 10;

/// Pages of a scan that wait to be sent.
pub(super) const PAGES_IN_FLIGHT: usize = 2;

/// The documents of a page.
type Page = Vec<(String, Document)>;

/// How long a scan may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScanLimits {
    /// How long the client may take to accept a page.
    pub(super) page: Duration,
    /// How long the whole scan may take.
    pub(super) scan: Duration,
}

impl Default for ScanLimits {
    fn default() -> ScanLimits {
        ScanLimits { page: Duration::from_secs(10), scan: Duration::from_secs(120) }
    }
}

/// The scans of a server.
pub(super) struct Scans {
    slots: Semaphore,
    limits: ScanLimits,
}

/// A scan that runs. Its transaction ends when this is dropped.
pub(super) struct Scan<'a> {
    _slot: SemaphorePermit<'a>,
    limits: ScanLimits,
    end: Instant,
    ready: mpsc::Receiver<Page>,
    reading: JoinHandle<Result<(u64, u64)>>,
    in_flight: Arc<Semaphore>,
}

/// What a scan answers next.
pub(super) enum ScanStep {
    /// A page. The next one waits until the permit is dropped: the page is sent.
    Page(Answer, OwnedSemaphorePermit),
    /// The last answer.
    End(Answer),
}

impl Scans {
    pub(super) fn new(limits: ScanLimits) -> Scans {
        Scans { slots: Semaphore::new(MAX_SCANS), limits }
    }

    /// Starts a scan when there is room for it.
    pub(super) async fn start(
        &self,
        documents: &Arc<SqliteDocuments>,
        queries: Vec<Query>,
    ) -> io::Result<Scan<'_>> {
        let slot = self.slots.acquire().await.map_err(io::Error::other)?;
        let (pages, ready) = mpsc::channel(1);
        let documents = documents.clone();
        let reading = tokio::task::spawn_blocking(move || read(&documents, &queries, &pages));
        Ok(Scan {
            _slot: slot,
            limits: self.limits,
            end: Instant::now() + self.limits.scan,
            ready,
            reading,
            in_flight: Arc::new(Semaphore::new(PAGES_IN_FLIGHT)),
        })
    }
}

impl Scan<'_> {
    pub(super) async fn next(&mut self) -> ScanStep {
        let page = match timeout_at(self.end, self.ready.recv()).await {
            Ok(Some(page)) => page,
            Ok(None) => return ScanStep::End(self.result().await),
            Err(_) => return ScanStep::End(failed("a listing takes too long")),
        };
        let limit = self.end.min(Instant::now() + self.limits.page);
        match timeout_at(limit, self.in_flight.clone().acquire_owned()).await {
            Ok(Ok(permit)) => ScanStep::Page(Answer::Page(page), permit),
            _ => ScanStep::End(failed("the client reads a listing too slowly")),
        }
    }

    /// Waits until all pages are sent. Returns `false` if the client does not take them.
    pub(super) async fn pages_are_sent(&self) -> bool {
        let all = self.in_flight.acquire_many(PAGES_IN_FLIGHT as u32);
        timeout_at(Instant::now() + self.limits.page, all).await.is_ok()
    }

    async fn result(&mut self) -> Answer {
        match (&mut self.reading).await {
            Ok(Ok((revision, documents))) => Answer::Scanned { revision, documents },
            Ok(Err(error)) => Answer::failed(&error),
            Err(_) => failed("the request panicked"),
        }
    }
}

fn failed(reason: &str) -> Answer {
    Answer::Failed(ErrorKind::Unavailable, reason.into())
}

/// Reads documents in one transaction, and passes them on in pages. Returns the revision and the
/// number of documents.
fn read(
    documents: &SqliteDocuments,
    queries: &[Query],
    pages: &mpsc::Sender<Page>,
) -> Result<(u64, u64)> {
    let (mut page, mut bytes, mut count) = (Page::new(), 0, 0);
    let ended = |_| Error::Internal { doing: "listing documents", reason: "nobody reads".into() };
    let revision = documents.scan_queries(queries, &mut |key, document| {
        bytes += document_len(key, &document);
        count += 1;
        page.push((key.into(), document));
        if bytes >= PAGE_BYTES {
            bytes = 0;
            pages.blocking_send(std::mem::take(&mut page)).map_err(ended)?;
        }
        Ok(())
    })?;
    if !page.is_empty() {
        pages.blocking_send(page).map_err(ended)?;
    }
    Ok((revision, count))
}
