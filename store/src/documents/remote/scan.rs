//! A scan on the client: the pages of a listing, over a connection of its own.
//!
//! The server sends the next page when the client has taken the one before. On a connection that
//! other requests share, a slow reader would delay their answers. A listing that breaks off is an
//! error: its last answer states how many documents there are.

use std::time::Duration;

use super::super::background::CallError;
use super::wire::{Answer, MAX_ANSWER};
use crate::documents::Document;
use crate::id::CatalogId;
use crate::net::connection::AnswerStream;
use crate::net::frame::Message;
use crate::net::handshake::CATALOG_PROTOCOL;
use crate::net::identity::{Role, Security};

/// The pages of a scan.
pub(super) struct ScanPages {
    stream: AnswerStream,
    /// How long the server may take for a page.
    limit: Duration,
    last_key: Option<String>,
    documents: u64,
}

/// Some documents of a scan, or its end.
pub(super) enum ScanPage {
    /// The next documents, in the order of their keys.
    Documents(Vec<(String, Document)>),
    /// All documents were passed, as of this revision.
    End(u64),
}

impl ScanPages {
    /// Connects to the catalog at this address.
    pub(super) async fn open(
        address: &str,
        security: &Security,
        limit: Duration,
    ) -> Result<ScanPages, CallError> {
        let stream =
            AnswerStream::open(address, security, Role::Catalog, &CATALOG_PROTOCOL, MAX_ANSWER)
                .await?;
        Ok(ScanPages { stream, limit, last_key: None, documents: 0 })
    }

    /// The catalog at the other end.
    pub(super) fn catalog(&self) -> CatalogId {
        CatalogId::from_bytes(self.stream.server())
    }

    /// Sends the request for the scan.
    pub(super) async fn send(&mut self, request: Message) -> Result<(), CallError> {
        Ok(self.stream.send(request).await?)
    }

    /// Waits for the next page.
    pub(super) async fn next(&mut self) -> Result<ScanPage, CallError> {
        let wrong = |reason: &str| CallError::Transient(reason.into());
        let lost = |_| wrong("the connection is lost");
        let (kind, body) = self.stream.next(self.limit).await.map_err(lost)?;
        match Answer::from_body(kind, &body) {
            Ok(Answer::Page(page)) => {
                let first = page.first().map(|(key, _)| key);
                if first.is_none() || first <= self.last_key.as_ref() {
                    return Err(wrong("a page that is out of order"));
                }
                self.last_key = page.last().map(|(key, _)| key.clone());
                self.documents += page.len() as u64;
                Ok(ScanPage::Documents(page))
            }
            Ok(Answer::Scanned { revision, documents }) if documents == self.documents => {
                Ok(ScanPage::End(revision))
            }
            Ok(Answer::Scanned { .. }) => Err(wrong("pages are missing")),
            Ok(Answer::Failed(kind, reason)) => Err(CallError::Permanent(kind, reason)),
            Ok(_) => Err(wrong("its answer does not match the request")),
            Err(error) => Err(CallError::Transient(error.to_string())),
        }
    }
}
