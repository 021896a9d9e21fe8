//! Parts of a folder in an etcd: a scan in pages, all as of the revision of the first, and the last
//! documents of a range.

use etcd_client::{GetOptions, SortOrder, SortTarget};

use super::{EtcdDocuments, Inner, document, is_too_large, read_document};
use crate::documents::background::{CallError, retry};
use crate::documents::ranges::{KeyRange, prefix_end, ranges};
use crate::documents::{Document, Each, Query, View};
use crate::error::{Error, ErrorKind, Result};

/// Documents in a page. A page of documents of the greatest length is too long for an answer.
const PAGE_DOCUMENTS: i64 = 512;

/// Documents in a page when one was too long: etcd refuses documents of more than 1.5 MiB unless it
/// is configured otherwise, and these fit into an answer.
const LARGE_PAGE_DOCUMENTS: i64 = 32;

/// Some documents of a range.
struct Page {
    revision: i64,
    documents: Vec<(String, Document)>,
    /// Whether the range has more.
    more: bool,
}

impl EtcdDocuments {
    /// Passes the documents that match a query to `each`, like `Documents::scan`. Every page is
    /// requested with retries: the revision does not change.
    pub(super) fn scan_queries(&self, queries: &[Query], each: Each<'_>) -> Result<u64> {
        let mut all = ranges(queries);
        if all.is_empty() {
            // This key never exists. The answer has the revision.
            all = ranges(&[Query::key("")]);
        }
        let (mut revision, mut count) = (0, PAGE_DOCUMENTS);
        for KeyRange { begin, end } in all {
            let (mut begin, end) = (document(&begin), document(&end));
            loop {
                let page = self.page(&begin, &end, revision, &mut count)?;
                revision = page.revision;
                if let Some((last, _)) = page.documents.last() {
                    // The key that follows the last one directly.
                    begin = format!("{}\0", document(last));
                }
                let more = page.more && !page.documents.is_empty();
                page.documents.into_iter().try_for_each(|(key, one)| each(&key, one))?;
                if !more {
                    break;
                }
            }
        }
        Ok(revision as u64)
    }

    /// A page of at most `count` documents as of `revision`, or as of now if that is 0. If the
    /// answer is too long, this page and later ones get fewer documents.
    fn page(&self, begin: &str, end: &str, revision: i64, count: &mut i64) -> Result<Page> {
        loop {
            let (inner, begin, end) = (self.inner.clone(), begin.to_owned(), end.to_owned());
            let asked = *count;
            let page = self.background.run(async move {
                let page = || inner.in_time(inner.page(&begin, &end, revision, asked));
                retry(&inner.address, inner.retry_timeout, false, page).await
            });
            match page? {
                Some(page) => return Ok(page),
                None if asked > 1 => *count = (asked / 2).min(LARGE_PAGE_DOCUMENTS),
                None => return Err(self.too_long()),
            }
        }
    }

    /// The last documents of a range, like `Documents::last`.
    pub(super) fn last_documents(&self, prefix: &str, before: &str, limit: usize) -> Result<View> {
        let mut count = (limit as i64).min(PAGE_DOCUMENTS);
        loop {
            let (inner, begin) = (self.inner.clone(), document(prefix));
            let (end, asked) = (document(before.min(&prefix_end(prefix))), count);
            let last = self.background.run(async move {
                let last = || inner.in_time(inner.last(&begin, &end, asked));
                retry(&inner.address, inner.retry_timeout, false, last).await
            });
            match last? {
                Some(view) => return Ok(view),
                None if asked > 1 => count = asked / 2,
                None => return Err(self.too_long()),
            }
        }
    }

    fn too_long(&self) -> Error {
        let (address, kind) = (self.inner.address.clone(), ErrorKind::Invalid);
        Error::Catalog { address, kind, reason: "a document is too long for an answer".into() }
    }
}

impl Inner {
    /// Reads the last `count` documents of a range; `None` if they do not fit into one answer.
    async fn last(&self, begin: &str, end: &str, count: i64) -> Result<Option<View>, CallError> {
        let options = GetOptions::new()
            .with_range(end)
            .with_limit(count)
            .with_sort(SortTarget::Key, SortOrder::Descend);
        let mut answer = match self.kv.clone().get(begin, Some(options)).await {
            Err(error) if is_too_large(&error) => return Ok(None),
            answer => answer?,
        };
        let revision = answer.header().map_or(0, |header| header.revision()) as u64;
        let documents = answer.take_kvs().into_iter().map(read_document).collect();
        Ok(Some(View { revision, documents }))
    }

    /// Reads a page; `None` if it does not fit into one answer.
    async fn page(
        &self,
        begin: &str,
        end: &str,
        revision: i64,
        count: i64,
    ) -> Result<Option<Page>, CallError> {
        let options = GetOptions::new().with_range(end).with_limit(count).with_revision(revision);
        let mut answer = match self.kv.clone().get(begin, Some(options)).await {
            Err(error) if is_too_large(&error) => return Ok(None),
            answer => answer?,
        };
        let now = answer.header().map_or(0, |header| header.revision());
        Ok(Some(Page {
            revision: if revision == 0 { now } else { revision },
            more: answer.more(),
            documents: answer.take_kvs().into_iter().map(read_document).collect(),
        }))
    }
}
