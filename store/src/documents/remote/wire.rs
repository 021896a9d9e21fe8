//! The messages between a catalog and its clients.
//!
//! Their kinds differ from those of the peers' protocol. Every count and length is checked against
//! the bytes that are there before memory is allocated for it. Each message has one encoding.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::documents::{Change, Document, Put, Query, View};
use crate::error::{Error, ErrorKind, Result};
use crate::net::message::{FAILED, MessageReader, failure_body, malformed, reason_of, utf8};

/// The longest request, in bytes.
pub const MAX_REQUEST: usize = 1 << 20;

/// The longest answer, in bytes.
pub const MAX_ANSWER: usize = 64 << 20;

/// The longest key, prefix or folder name, in bytes.
pub const MAX_KEY: usize = 1024;

/// The most keys and prefixes in one read.
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
}

/// An answer of a catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The documents of a read.
    View(View),
    /// Whether the change was carried out.
    Committed(bool),
    /// A document has changed, or the time is over.
    Waited,
    /// The request was not carried out.
    Failed(ErrorKind, String),
}

const READ: u16 = 202;
const COMMIT: u16 = 203;
const WAIT: u16 = 204;
const VIEW: u16 = 302;
const COMMITTED: u16 = 303;
const WAITED: u16 = 304;

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
        };
        (kind, body)
    }

    /// Decodes a request of this kind.
    pub fn from_body(kind: u16, body: &Bytes) -> Result<Request> {
        let mut body = MessageReader::new(body);
        let request = match kind {
            READ => match body.all(MessageReader::query)? {
                queries if queries.len() > MAX_QUERIES => {
                    return Err(malformed("a read with too many queries"));
                }
                queries => Request::Read(queries),
            },
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
            _ => return Err(malformed("a request of an unknown kind")),
        };
        body.end().map(|()| request)
    }
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
                body.extend_from_slice(&view.revision.to_le_bytes());
                body.extend_from_slice(&(view.documents.len() as u32).to_le_bytes());
                for (key, Document { value, version }) in &view.documents {
                    write_text(&mut body, key);
                    body.extend_from_slice(&version.to_le_bytes());
                    write_bytes(&mut body, value);
                }
                VIEW
            }
            Answer::Committed(carried_out) => {
                body.push((*carried_out).into());
                COMMITTED
            }
            Answer::Waited => WAITED,
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
            VIEW => {
                let revision = body.u64()?;
                let mut documents = BTreeMap::<String, Document>::new();
                for _ in 0..body.u32()? {
                    let (key, version) = (body.text()?, body.u64()?);
                    let value = body.bytes()?;
                    if documents.last_key_value().is_some_and(|(last, _)| *last >= key) {
                        return Err(malformed("documents that are not in order"));
                    }
                    documents.insert(key, Document { value, version });
                }
                Answer::View(View { revision, documents })
            }
            COMMITTED => Answer::Committed(body.flag()?),
            WAITED => Answer::Waited,
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
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::option;
    use proptest::prelude::{Just, Strategy, any, prop_assert_eq, prop_oneof, proptest};

    use super::{Answer, Bytes, Change, Document, Put, Query, Request, View};
    use crate::net::message::FAILURE_KINDS;

    fn query() -> impl Strategy<Value = Query> {
        (any::<bool>(), ".{0,20}").prop_map(|(whole, text)| match whole {
            true => Query::Key(text),
            false => Query::Prefix(text),
        })
    }

    fn change() -> impl Strategy<Value = Change> {
        let put = (".{0,20}", vec(any::<u8>(), 0..50), option::of(any::<u32>()))
            .prop_map(|(key, value, seconds)| Put { key, value, seconds });
        let relies_on = vec((".{0,20}", any::<u64>()), 0..4);
        (relies_on, vec(query(), 0..4), vec(put, 0..4), any::<bool>()).prop_map(
            |(relies_on, removes, puts, relaxed)| Change { relies_on, removes, puts, relaxed },
        )
    }

    fn request() -> impl Strategy<Value = Request> {
        prop_oneof![
            vec(query(), 0..5).prop_map(Request::Read),
            (any::<Option<[u8; 16]>>(), change()).prop_map(|(t, c)| Request::Commit(t, c)),
            (".{0,20}", any::<(u64, u32)>())
                .prop_map(|(folder, (revision, time))| Request::Wait(folder, revision, time)),
        ]
    }

    fn answer() -> impl Strategy<Value = Answer> {
        let document = (vec(any::<u8>(), 0..50), any::<u64>())
            .prop_map(|(value, version)| Document { value, version });
        let documents = btree_map(".{0,20}", document, 0..6);
        prop_oneof![
            (any::<u64>(), documents)
                .prop_map(|(revision, documents)| Answer::View(View { revision, documents })),
            any::<bool>().prop_map(Answer::Committed),
            Just(Answer::Waited),
            (0usize..5, ".{0,40}")
                .prop_map(|(kind, text)| Answer::Failed(FAILURE_KINDS[kind], text)),
        ]
    }

    proptest! {
        #[test]
        fn a_message_decodes_to_what_was_encoded(request in request(), answer in answer()) {
            let (kind, body) = request.to_body();
            prop_assert_eq!(Request::from_body(kind, &body.into()).unwrap(), request);
            let (kind, body) = answer.to_body();
            prop_assert_eq!(Answer::from_body(kind, &body.into()).unwrap(), answer);
        }

        #[test]
        fn damaged_bytes_are_refused_or_are_the_one_encoding_of_a_message(
            request in request(),
            answer in answer(),
            flips in vec((any::<usize>(), any::<u8>()), 0..4),
            cut in any::<usize>(),
        ) {
            for (kind, mut body) in [request.to_body(), answer.to_body()] {
                for (at, mask) in &flips {
                    if !body.is_empty() {
                        let at = at % body.len();
                        body[at] ^= mask;
                    }
                }
                if cut % 3 == 0 {
                    body.truncate(cut % (body.len() + 1));
                }
                let bytes = Bytes::copy_from_slice(&body);
                if let Ok(found) = Request::from_body(kind, &bytes) {
                    prop_assert_eq!(found.to_body(), (kind, body.clone()));
                }
                if let Ok(found) = Answer::from_body(kind, &bytes) {
                    prop_assert_eq!(found.to_body(), (kind, body));
                }
            }
        }
    }
}
