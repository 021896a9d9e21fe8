//! The messages between a catalog and its clients.
//!
//! Their kinds differ from those of the peers' protocol. Every count and length is checked against
//! the bytes that are there before memory is allocated for it. Each message has one encoding.

use bytes::Bytes;

use crate::documents::{Change, Changed, Document, Put, Query, View};
use crate::error::{Error, ErrorKind, Result};
use crate::net::message::{FAILED, MessageReader, failure_body, malformed, reason_of, utf8};

/// The longest request, in bytes.
pub const MAX_REQUEST: usize = 1 << 20;

/// The longest answer, in bytes. Documents that do not fit into one answer are scanned.
pub const MAX_ANSWER: usize = 8 << 20;

/// The longest key, prefix or folder name, in bytes.
pub const MAX_KEY: usize = 1024;

/// The most keys and prefixes in one read or scan.
pub const MAX_QUERIES: usize = 4096;

/// Identifies a change, so that it is carried out once even if it is sent several times.
pub type Token = [u8; 16];

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Read the documents that match a query.
    Read(Vec<Query>),
    /// Carry out a change; at most once if there is a token.
    Commit(Option<Token>, Change),
    /// Answer when a document in this folder has changed after this revision, or after this many
    /// milliseconds.
    Wait(String, u64, u32),
    /// Send the documents that match a query in several answers.
    Scan(Vec<Query>),
    /// Read the last documents under a prefix whose keys are less than another key, at most this
    /// many.
    Last(String, String, u32),
    /// Read the documents under a prefix that were written after a revision.
    Changed(String, u64),
}

/// An answer of a catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The documents of a read.
    View(View),
    /// The documents of a read do not fit into one answer.
    TooLarge,
    /// The next documents of a scan, at least one, in the order of their keys.
    Page(Vec<(String, Document)>),
    /// The end of a scan.
    Scanned {
        /// The latest revision at the moment that the scan shows.
        revision: u64,
        /// The number of documents in all pages.
        documents: u64,
    },
    /// Whether the change was carried out.
    Committed(bool),
    /// The documents that were written after a revision.
    Changed(Changed),
    /// Whether a document has changed. If not, the time is over.
    Waited(bool),
    /// The request was not carried out.
    Failed(ErrorKind, String),
}

const READ: u16 = 202;
const COMMIT: u16 = 203;
const WAIT: u16 = 204;
const SCAN: u16 = 205;
const LAST: u16 = 206;
const READ_CHANGED: u16 = 207;
const VIEW: u16 = 302;
const COMMITTED: u16 = 303;
const WAITED: u16 = 304;
const PAGE: u16 = 305;
const SCANNED: u16 = 306;
const TOO_LARGE: u16 = 307;
const CHANGED: u16 = 308;

impl Request {
    /// The kind and the body of the message.
    pub fn to_body(&self) -> (u16, Vec<u8>) {
        let mut body = Vec::new();
        let kind = match self {
            Request::Read(queries) => {
                write_all(&mut body, queries, write_query);
                READ
            }
            Request::Commit(token, change) => {
                write_option(&mut body, token.as_ref(), |body, token| body.extend(token));
                body.push(change.relaxed.into());
                write_all(&mut body, &change.relies_on, |body, (key, version)| {
                    write_text(body, key);
                    body.extend_from_slice(&version.to_le_bytes());
                });
                write_all(&mut body, &change.removes, write_query);
                write_all(&mut body, &change.puts, |body, Put { key, value, seconds }| {
                    write_text(body, key);
                    write_option(body, seconds.as_ref(), |body, seconds| {
                        body.extend_from_slice(&seconds.to_le_bytes());
                    });
                    write_bytes(body, value);
                });
                COMMIT
            }
            Request::Wait(folder, revision, milliseconds) => {
                write_text(&mut body, folder);
                body.extend_from_slice(&revision.to_le_bytes());
                body.extend_from_slice(&milliseconds.to_le_bytes());
                WAIT
            }
            Request::Scan(queries) => {
                write_all(&mut body, queries, write_query);
                SCAN
            }
            Request::Last(prefix, before, limit) => {
                write_text(&mut body, prefix);
                write_text(&mut body, before);
                body.extend_from_slice(&limit.to_le_bytes());
                LAST
            }
            Request::Changed(prefix, revision) => {
                write_text(&mut body, prefix);
                body.extend_from_slice(&revision.to_le_bytes());
                READ_CHANGED
            }
        };
        (kind, body)
    }

    /// Decodes a request of this kind.
    pub fn from_body(kind: u16, body: &Bytes) -> Result<Request> {
        let mut body = MessageReader::new(body);
        let request = match kind {
            READ => Request::Read(body.queries()?),
            SCAN => Request::Scan(body.queries()?),
            COMMIT => {
                let token = body.option(MessageReader::array)?;
                let relaxed = body.flag()?;
                let relies_on = body.all(|body| Ok((body.text()?, body.u64()?)))?;
                let removes = body.all(MessageReader::query)?;
                let puts = body.all(|body| {
                    let (key, seconds) = (body.text()?, body.option(MessageReader::u32)?);
                    Ok(Put { key, value: body.bytes()?, seconds })
                })?;
                Request::Commit(token, Change { relies_on, removes, puts, relaxed })
            }
            WAIT => Request::Wait(body.text()?, body.u64()?, body.u32()?),
            LAST => Request::Last(body.text()?, body.text()?, body.u32()?),
            READ_CHANGED => Request::Changed(body.text()?, body.u64()?),
            _ => return Err(malformed("a request of an unknown kind")),
        };
        body.end().map(|()| request)
    }
}

/// Whether the answer to a request of this kind may be long.
pub(super) fn may_have_long_answer(kind: u16) -> bool {
    [READ, LAST, READ_CHANGED].contains(&kind)
}

impl Answer {
    /// The answer to a request that failed with `error`.
    pub fn failed(error: &Error) -> Answer {
        Answer::Failed(error.kind(), reason_of(error))
    }

    /// The kind and the body of the message.
    pub fn to_body(&self) -> (u16, Vec<u8>) {
        let mut body = Vec::new();
        let kind = match self {
            Answer::View(view) => {
                write_view(&mut body, view);
                VIEW
            }
            Answer::Changed(Changed { view, total }) => {
                body.extend_from_slice(&total.to_le_bytes());
                write_view(&mut body, view);
                CHANGED
            }
            Answer::TooLarge => TOO_LARGE,
            Answer::Page(page) => {
                write_all(&mut body, page, |body, (key, one)| write_document(body, key, one));
                PAGE
            }
            Answer::Scanned { revision, documents } => {
                body.extend_from_slice(&revision.to_le_bytes());
                body.extend_from_slice(&documents.to_le_bytes());
                SCANNED
            }
            Answer::Committed(carried_out) => {
                body.push((*carried_out).into());
                COMMITTED
            }
            Answer::Waited(changed) => {
                body.push((*changed).into());
                WAITED
            }
            Answer::Failed(kind, reason) => {
                body = failure_body(*kind, reason);
                FAILED
            }
        };
        (kind, body)
    }

    /// Decodes an answer of this kind.
    pub fn from_body(kind: u16, body: &Bytes) -> Result<Answer> {
        let mut body = MessageReader::new(body);
        let answer = match kind {
            VIEW => Answer::View(body.view()?),
            CHANGED => Answer::Changed(Changed { total: body.u64()?, view: body.view()? }),
            TOO_LARGE => Answer::TooLarge,
            PAGE => Answer::Page(body.documents()?),
            SCANNED => Answer::Scanned { revision: body.u64()?, documents: body.u64()? },
            COMMITTED => Answer::Committed(body.flag()?),
            WAITED => Answer::Waited(body.flag()?),
            FAILED => {
                let (kind, reason) = body.failure()?;
                Answer::Failed(kind, reason)
            }
            _ => return Err(malformed("an answer of an unknown kind")),
        };
        body.end().map(|()| answer)
    }
}

/// Fails if this key, prefix or folder is too long for a catalog.
pub(super) fn check_key(key: &str) -> Result<()> {
    if key.len() > MAX_KEY {
        let what = "a key of the catalog, in bytes,";
        return Err(Error::TooLarge { what, actual: key.len(), limit: MAX_KEY });
    }
    Ok(())
}

/// Appends a text with two bytes for its length. The caller has [checked](check_key) the length.
fn write_text(body: &mut Vec<u8>, text: &str) {
    body.extend_from_slice(&(text.len() as u16).to_le_bytes());
    body.extend_from_slice(text.as_bytes());
}

fn write_bytes(body: &mut Vec<u8>, bytes: &[u8]) {
    body.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    body.extend_from_slice(bytes);
}

fn write_view(body: &mut Vec<u8>, view: &View) {
    body.extend_from_slice(&view.revision.to_le_bytes());
    body.extend_from_slice(&(view.documents.len() as u32).to_le_bytes());
    view.documents.iter().for_each(|(key, one)| write_document(body, key, one));
}

fn write_document(body: &mut Vec<u8>, key: &str, Document { value, version }: &Document) {
    write_text(body, key);
    body.extend_from_slice(&version.to_le_bytes());
    write_bytes(body, value);
}

/// The length of a document in a message, in bytes.
pub(super) fn document_len(key: &str, document: &Document) -> usize {
    2 + key.len() + 8 + 4 + document.value.len()
}

fn write_query(body: &mut Vec<u8>, query: &Query) {
    let (tag, text) = match query {
        Query::Key(key) => (0, key),
        Query::Prefix(prefix) => (1, prefix),
    };
    body.push(tag);
    write_text(body, text);
}

fn write_option<T>(body: &mut Vec<u8>, one: Option<T>, write: impl Fn(&mut Vec<u8>, T)) {
    body.push(one.is_some().into());
    if let Some(one) = one {
        write(body, one);
    }
}

fn write_all<T>(body: &mut Vec<u8>, all: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
    body.extend_from_slice(&(all.len() as u32).to_le_bytes());
    all.iter().for_each(|one| write(body, one));
}

/// Parts of messages that only this protocol has.
impl MessageReader<'_> {
    fn text(&mut self) -> Result<String> {
        match self.u16()?.into() {
            len if len <= MAX_KEY => utf8(self.slice(len)?),
            _ => Err(malformed("a key that is too long")),
        }
    }

    fn bytes(&mut self) -> Result<Vec<u8>> {
        let len = self.u32()? as usize;
        self.slice(len).map(<[u8]>::to_vec)
    }

    fn query(&mut self) -> Result<Query> {
        Ok(if self.flag()? { Query::Prefix(self.text()?) } else { Query::Key(self.text()?) })
    }

    fn queries(&mut self) -> Result<Vec<Query>> {
        match self.all(MessageReader::query)? {
            queries if queries.len() > MAX_QUERIES => Err(malformed("too many queries")),
            queries => Ok(queries),
        }
    }

    fn view(&mut self) -> Result<View> {
        let revision = self.u64()?;
        Ok(View { revision, documents: self.documents()?.into_iter().collect() })
    }

    /// Documents in the order of their keys.
    fn documents(&mut self) -> Result<Vec<(String, Document)>> {
        let documents = self.all(|body| {
            let (key, version) = (body.text()?, body.u64()?);
            Ok((key, Document { value: body.bytes()?, version }))
        })?;
        match documents.windows(2).all(|pair| pair[0].0 < pair[1].0) {
            true => Ok(documents),
            false => Err(malformed("documents that are not in order")),
        }
    }

    fn option<T>(&mut self, read: impl Fn(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.flag()? { read(self).map(Some) } else { Ok(None) }
    }

    /// A count and that many elements. Memory grows with the elements found, not with the count.
    fn all<T>(&mut self, read: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut all = Vec::new();
        for _ in 0..self.u32()? {
            all.push(read(self)?);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests;
