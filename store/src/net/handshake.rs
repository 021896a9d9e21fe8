//! The first two frames of a connection: they agree on the protocol and its version.
//!
//! ```text
//! client ── hello: magic of the protocol, oldest and newest version ──► server
//!        ◄── welcome: the version to use, the server's id ────────────
//!        ◄── or a failure, which says what to do ─────────────────────
//! ```

use std::io;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::frame::{Message, OutgoingFrames, read_body, read_header};
use super::message::{FAILED, MessageReader, failure_body, malformed, reason_of};
use crate::error::{ErrorKind, Result};

pub(crate) const HELLO: u16 = 1;
pub(crate) const WELCOME: u16 = 101;

/// How long each side may take for its part of the handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest body in a handshake, in bytes. A failure with its reason fits.
const MAX_HANDSHAKE: usize = 8192;

/// A protocol that connections carry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Protocol {
    /// What the server is, in a word: `peer` or `catalog`.
    pub(crate) server: &'static str,
    pub(crate) magic: [u8; 4],
    /// The oldest version that this program knows.
    pub(crate) oldest: u16,
    /// The newest version that this program knows. Both sides use the newest that both know.
    pub(crate) newest: u16,
}

/// All protocols. A server recognises the hello of another protocol and says so in its refusal.
const PROTOCOLS: [&Protocol; 2] = [&PEER_PROTOCOL, &CATALOG_PROTOCOL];

/// The protocol of peers. Versions 1 to 4 were never released.
pub(crate) const PEER_PROTOCOL: Protocol =
    Protocol { server: "peer", magic: *b"CRNW", oldest: 5, newest: 5 };

/// The protocol of catalogs. Versions 1 and 2 were never released.
pub(crate) const CATALOG_PROTOCOL: Protocol =
    Protocol { server: "catalog", magic: *b"CRNC", oldest: 3, newest: 3 };

/// Why a handshake failed.
#[derive(Debug)]
pub(crate) enum HandshakeError {
    /// The connection failed.
    Io(io::Error),
    /// The server closed the connection without an answer, or did not answer in time.
    Closed,
    /// The server refused.
    Refused(ErrorKind, String),
    /// The server does not speak the protocol.
    OtherProtocol,
    /// The certificate of the server is that of another peer than the server says it is.
    OtherIdentity(String),
}

/// The hello of a client that knows the versions from `oldest` to `newest`.
pub(crate) fn hello(protocol: &Protocol, oldest: u16, newest: u16) -> Message {
    let body = [&protocol.magic[..], &oldest.to_le_bytes(), &newest.to_le_bytes()].concat();
    (HELLO, vec![body.into()])
}

/// Performs the client's part of the handshake. Returns the id of the server.
pub(crate) async fn introduce(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    protocol: &Protocol,
) -> Result<[u8; 16], HandshakeError> {
    let mut frames = OutgoingFrames::default();
    frames.push(0, hello(protocol, protocol.oldest, protocol.newest));
    frames.send(writer).await.map_err(HandshakeError::Io)?;
    let header = match read_header(reader, HANDSHAKE_TIMEOUT, MAX_HANDSHAKE).await {
        Ok(None) => return Err(HandshakeError::Closed),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            return Err(HandshakeError::Closed);
        }
        Err(error) => return Err(HandshakeError::Io(error)),
        Ok(Some(header)) => header.map_err(|_| HandshakeError::OtherProtocol)?,
    };
    let body = read_body(reader, &header).await.map_err(HandshakeError::Io)?;
    match header.kind {
        _ if header.number != 0 => Err(HandshakeError::OtherProtocol),
        WELCOME => match read_welcome(&body) {
            Ok((version, id)) if (protocol.oldest..=protocol.newest).contains(&version) => Ok(id),
            _ => Err(HandshakeError::OtherProtocol),
        },
        FAILED => match MessageReader::new(&body).failure() {
            Ok((kind, reason)) => Err(HandshakeError::Refused(kind, reason)),
            Err(_) => Err(HandshakeError::OtherProtocol),
        },
        _ => Err(HandshakeError::OtherProtocol),
    }
}

/// The version to use, and the server's id.
fn read_welcome(body: &Bytes) -> Result<(u16, [u8; 16])> {
    let mut body = MessageReader::new(body);
    let welcome = (body.u16()?, body.array()?);
    body.end().map(|()| welcome)
}

/// Performs the server's part of the handshake; `id` is the server's. Returns whether the client
/// was accepted.
pub(crate) async fn greet(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    protocol: &Protocol,
    id: &[u8; 16],
) -> io::Result<bool> {
    let header = read_header(reader, HANDSHAKE_TIMEOUT, MAX_HANDSHAKE).await?;
    let Some(header) = header else { return Ok(false) };
    let header = header.map_err(io::Error::other)?;
    let body = timeout(HANDSHAKE_TIMEOUT, read_body(reader, &header)).await??;
    let version = match header.kind {
        HELLO => choose_version(protocol, &body),
        _ => Err((ErrorKind::Invalid, "a client begins with a hello".into())),
    };
    let answer = match &version {
        Ok(version) => (WELCOME, [&version.to_le_bytes()[..], id].concat()),
        Err((kind, reason)) => (FAILED, failure_body(*kind, reason)),
    };
    let mut frames = OutgoingFrames::default();
    frames.push(header.number, (answer.0, vec![answer.1.into()]));
    frames.send(writer).await?;
    Ok(version.is_ok())
}

/// The version to use with a client that sent this hello, or why the client is refused.
pub(crate) fn choose_version(
    protocol: &Protocol,
    hello: &Bytes,
) -> Result<u16, (ErrorKind, String)> {
    let (magic, oldest, newest) =
        read_hello(hello).map_err(|error| (error.kind(), reason_of(&error)))?;
    let refuse = |reason| Err((ErrorKind::Invalid, reason));
    let Protocol { server, oldest: own_oldest, newest: own_newest, .. } = protocol;
    match PROTOCOLS.iter().find(|one| one.magic == magic) {
        None => refuse("a hello of an unknown protocol".into()),
        Some(other) if *other != protocol => {
            let other = other.server;
            refuse(format!("a {server} listens there, not a {other}; name the {other}'s address"))
        }
        Some(_) if oldest <= *own_newest && newest >= *own_oldest => Ok(newest.min(*own_newest)),
        Some(_) => refuse(format!(
            "the {server} knows versions {own_oldest} to {own_newest} of its protocol, the client \
             {oldest} to {newest}; update the older program"
        )),
    }
}

fn read_hello(body: &Bytes) -> Result<([u8; 4], u16, u16)> {
    let mut body = MessageReader::new(body);
    let hello = (body.array()?, body.u16()?, body.u16()?);
    if hello.1 > hello.2 {
        return Err(malformed("a hello whose oldest version is newer than its newest"));
    }
    body.end().map(|()| hello)
}

/// Helpers for tests that use a raw connection.
#[cfg(test)]
pub(crate) mod testing {
    use bytes::Bytes;

    use super::super::frame::{HEADER, Header};
    use super::super::message::{FAILED, MessageReader};
    use super::{Protocol, WELCOME, hello};
    use crate::error::ErrorKind;

    /// A frame that a server sent.
    #[derive(Debug)]
    pub(crate) enum Heard {
        /// A welcome with this version.
        Welcome(u16),
        Failed(ErrorKind, String),
        /// Another answer.
        Answer,
    }

    /// Decodes the frames in these bytes, which end after a frame.
    pub(crate) fn frames_in(mut bytes: &[u8]) -> Vec<Heard> {
        let mut heard = Vec::new();
        while let Some((head, rest)) = bytes.split_first_chunk::<HEADER>() {
            let header = Header::from_bytes(head, usize::MAX).unwrap();
            let (body, rest) = rest.split_at(header.len);
            let body = Bytes::copy_from_slice(body);
            let mut body = MessageReader::new(&body);
            heard.push(match header.kind {
                WELCOME => Heard::Welcome(body.u16().unwrap()),
                FAILED => {
                    let (kind, reason) = body.failure().unwrap();
                    Heard::Failed(kind, reason)
                }
                _ => Heard::Answer,
            });
            bytes = rest;
        }
        heard
    }

    /// A hello as a frame: its header and its body.
    pub(crate) fn hello_frame(protocol: &Protocol, oldest: u16, newest: u16) -> (Header, Vec<u8>) {
        let (kind, parts) = hello(protocol, oldest, newest);
        let body = parts.concat();
        (Header { kind, number: 7, len: body.len() }, body)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, proptest};

    use super::{
        CATALOG_PROTOCOL, ErrorKind, HandshakeError, PEER_PROTOCOL, choose_version, greet, hello,
        introduce,
    };

    #[tokio::test]
    async fn a_client_that_reaches_another_kind_of_server_gets_a_clear_refusal() {
        for (ours, theirs) in [
            (&PEER_PROTOCOL, &PEER_PROTOCOL),
            (&PEER_PROTOCOL, &CATALOG_PROTOCOL),
            (&CATALOG_PROTOCOL, &PEER_PROTOCOL),
        ] {
            let (client, server) = tokio::io::duplex(1024);
            let (mut from_client, mut to_client) = tokio::io::split(server);
            let (mut from_server, mut to_server) = tokio::io::split(client);
            let (greeted, introduced) = tokio::join!(
                greet(&mut from_client, &mut to_client, theirs, &[9; 16]),
                introduce(&mut from_server, &mut to_server, ours),
            );
            assert_eq!(greeted.unwrap(), ours == theirs);
            match introduced {
                Ok(id) => assert!(ours == theirs && id == [9; 16]),
                Err(HandshakeError::Refused(ErrorKind::Invalid, reason)) => {
                    let [is, wanted] = [theirs.server, ours.server];
                    assert_eq!(
                        reason,
                        format!(
                            "a {is} listens there, not a {wanted}; name the {wanted}'s address"
                        )
                    );
                }
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn only_a_hello_with_a_common_version_is_accepted(
            oldest in 0u16..6,
            newest in 0u16..6,
            noise in vec(any::<u8>(), 0..20),
        ) {
            let body = hello(&PEER_PROTOCOL, oldest, newest).1.concat().into();
            let [first, last] = [PEER_PROTOCOL.oldest, PEER_PROTOCOL.newest];
            let is_common = oldest <= newest && oldest <= last && newest >= first;
            assert_eq!(choose_version(&PEER_PROTOCOL, &body).ok(), is_common.then_some(newest.min(last)));
            let is_hello = noise.len() == 8 && noise.starts_with(&PEER_PROTOCOL.magic);
            assert!(is_hello || choose_version(&PEER_PROTOCOL, &noise.into()).is_err());
        }
    }
}
