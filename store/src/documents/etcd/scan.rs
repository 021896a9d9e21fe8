//! A scan of documents in an etcd: pages, all as of the revision of the first.

use etcd_client::GetOptions;

use super::{EtcdDocuments, Inner, document, is_too_large, read_document};
use crate::documents::background::{CallError, retry};
use crate::documents::ranges::{KeyRange, ranges};
use crate::documents::{Document, Each, Query};
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
                None => {
                    let (address, kind) = (self.inner.address.clone(), ErrorKind::Invalid);
                    let reason = "a document is too long for an answer".into();
                    return Err(Error::Catalog { address, kind, reason });
                }
            }
        }
    }
}

impl Inner {
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
