//! A client's connection to a catalog.

use std::io;

use rustls::{CertificateError, Error as TlsError};

use super::super::background::CallError;
use super::wire::{Answer, MAX_ANSWER};
use crate::error::ErrorKind;
use crate::id::CatalogId;
use crate::net::connection;
use crate::net::frame::Message;
use crate::net::handshake::{CATALOG_PROTOCOL, HandshakeError};
use crate::net::identity::{Role, Security};

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> CallError {
        let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>());
        let reason = match tls {
            None => return CallError::Transient(error.to_string()),
            Some(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => "the server there is not a catalog; name the catalog's address".into(),
            Some(TlsError::InvalidMessage(_)) => {
                "the server there does not use TLS; was it started with --insecure?".into()
            }
            Some(error) => {
                format!("{error}; use keys of its cluster that are not revoked")
            }
        };
        CallError::Permanent(ErrorKind::Invalid, reason)
    }
}

impl From<HandshakeError> for CallError {
    fn from(error: HandshakeError) -> CallError {
        match error {
            HandshakeError::Io(error) => error.into(),
            HandshakeError::Closed => CallError::Transient(
                "it closes the connection at once; it may expect TLS, or have too many clients"
                    .into(),
            ),
            HandshakeError::Refused(kind, reason) => CallError::Permanent(kind, reason),
            HandshakeError::OtherProtocol => {
                CallError::Permanent(ErrorKind::Invalid, "it does not speak the protocol".into())
            }
            HandshakeError::OtherIdentity(reason) => {
                CallError::Permanent(ErrorKind::Invalid, reason)
            }
        }
    }
}

/// A connection. When it is lost, every request fails, including those in flight.
pub(super) struct Connection(connection::Connection);

impl Connection {
    /// Connects to the catalog at this address.
    pub(super) async fn open(address: &str, security: &Security) -> Result<Connection, CallError> {
        let open = connection::Connection::open(
            address,
            security,
            Role::Catalog,
            &CATALOG_PROTOCOL,
            MAX_ANSWER,
        );
        Ok(Connection(open.await?))
    }

    /// The catalog at the other end.
    pub(super) fn catalog(&self) -> CatalogId {
        CatalogId::from_bytes(self.0.server())
    }

    pub(super) fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    pub(super) fn close(&self) {
        self.0.close();
    }

    /// Sends a request and waits for its answer.
    pub(super) async fn ask(&self, request: Message) -> Result<Answer, CallError> {
        let lost = |_| CallError::Transient("the connection is lost".into());
        let (kind, body) = self.0.ask(request).await.map_err(lost)?;
        match Answer::from_body(kind, &body) {
            Ok(Answer::Failed(kind, reason)) => Err(CallError::Permanent(kind, reason)),
            Ok(answer) => Ok(answer),
            Err(error) => {
                // Later messages on this connection cannot be trusted either.
                self.close();
                Err(CallError::Transient(error.to_string()))
            }
        }
    }
}
