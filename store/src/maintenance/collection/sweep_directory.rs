//! Deletes from a directory what is not marked.

use super::{Collection, CollectionProgress, CollectionReport};
use crate::blobs::directory::{DirectoryBlobs, ListedBlob};
use crate::durable::sorted_runs::SortedRuns;
use crate::error::{Error, Result};

/// The blobs that are listed at a time.
const PAGE: usize = if cfg!(test) { 16 } else { 4096 };

/// The blobs that one transaction deletes. Commits wait for it.
const MAX_DELETED: usize = 512;

impl Collection<'_> {
    /// Deletes the blobs that are not marked and whose stamp is below the bound.
    pub(super) fn sweep_directory(
        &self,
        blobs: &DirectoryBlobs,
        marked: &SortedRuns<32>,
        report: &mut CollectionReport,
    ) -> Result<()> {
        if !self.options.dry_run {
            if !blobs.begin_collection(report.number)? {
                return Err(Error::LeaseLost);
            }
            // What an earlier collection has left.
            blobs.reclaim()?;
        }
        (self.progress)(CollectionProgress::Sweeping { seen: 0, freed: 0 });
        let (mut marked, mut after, mut seen) = (marked.read()?, None, 0);
        loop {
            let page = blobs.list(after, PAGE)?;
            let Some(last) = page.last() else { break };
            after = Some(last.id);
            seen += page.len() as u64;
            let mut garbage = Vec::new();
            for blob in page {
                if marked.seek(blob.id.as_bytes())?.as_ref() == Some(blob.id.as_bytes()) {
                    report.live.add(blob.space);
                } else if blob.stamp < report.bound {
                    garbage.push(blob);
                } else {
                    report.waiting.add(blob.space);
                }
            }
            for some in garbage.chunks(MAX_DELETED) {
                self.delete_from_directory(blobs, some, report)?;
            }
            let freed = report.freed.bytes;
            (self.progress)(CollectionProgress::Sweeping { seen, freed });
        }
        if self.options.dry_run {
            return Ok(());
        }
        let left = blobs.reclaim()?;
        if left > 0 {
            tracing::warn!(
                bytes = left,
                "the file system has no holes: freed space stays in files"
            );
        }
        Ok(())
    }

    fn delete_from_directory(
        &self,
        blobs: &DirectoryBlobs,
        garbage: &[ListedBlob],
        report: &mut CollectionReport,
    ) -> Result<()> {
        let bytes: u64 = garbage.iter().map(|blob| blob.space).sum();
        let all = garbage.len() as u64;
        if self.options.dry_run {
            report.freed.objects += all;
            report.freed.bytes += bytes;
            return Ok(());
        }
        if !(self.proceed)() {
            return Err(Error::LeaseLost);
        }
        let ids: Vec<_> = garbage.iter().map(|blob| blob.id).collect();
        let removed = blobs.remove(&ids, report.number, report.bound)?;
        report.freed.objects += removed.blobs;
        report.freed.bytes += removed.bytes;
        // Commits have found the others present since they were listed.
        report.waiting.objects += all - removed.blobs;
        report.waiting.bytes += bytes.saturating_sub(removed.bytes);
        Ok(())
    }
}
