//! The parts that message bodies are made of. All numbers are little endian.
//!
//! Bytes from the network are not trusted: every length is checked against the bytes that are there
//! before memory is allocated for it. A message has exactly one encoding.

use bytes::Bytes;

use crate::error::{Error, ErrorKind, Result};

/// The frame kind of a failure, in every protocol.
pub(crate) const FAILED: u16 = 106;

/// The longest reason of a failure, in bytes.
const MAX_REASON_BYTES: usize = 4096;

/// The kinds of failures. The position in this table is the number on the wire.
pub(crate) const FAILURE_KINDS: [ErrorKind; 5] = [
    ErrorKind::Invalid,
    ErrorKind::NotFound,
    ErrorKind::Conflict,
    ErrorKind::Corrupt,
    ErrorKind::Unavailable,
];

/// The error for a message that breaks its protocol.
pub(crate) fn malformed(what: &str) -> Error {
    Error::corrupt("a message", what)
}

/// The message of an error, cut to the length that can be sent.
pub(crate) fn reason_of(error: &Error) -> String {
    error.to_string().chars().take(MAX_REASON_BYTES / 4).collect()
}

/// The body of a [failure](FAILED).
pub(crate) fn failure_body(kind: ErrorKind, reason: &str) -> Vec<u8> {
    [&[failure_number(kind)], reason.as_bytes()].concat()
}

/// The number under which a kind of failure is sent.
pub(crate) fn failure_number(kind: ErrorKind) -> u8 {
    FAILURE_KINDS.iter().position(|one| *one == kind).expect("the table has every kind") as u8
}

/// The kind of failure with this number.
pub(crate) fn failure_kind(number: u8) -> Result<ErrorKind> {
    FAILURE_KINDS.get(usize::from(number)).copied().ok_or_else(|| malformed("an unknown failure"))
}

/// Reads a message body from its start to its end.
pub(crate) struct MessageReader<'a> {
    whole: &'a Bytes,
    rest: &'a [u8],
}

impl<'a> MessageReader<'a> {
    /// A reader at the start of a body.
    pub(crate) fn new(body: &'a Bytes) -> MessageReader<'a> {
        MessageReader { whole: body, rest: body }
    }

    /// The bytes that are not read yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `N` bytes.
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) =
            self.rest.split_first_chunk().ok_or_else(|| malformed("it is cut off"))?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(malformed("a flag that is neither 0 nor 1")),
        }
    }

    /// The next `len` bytes.
    pub(crate) fn slice(&mut self, len: usize) -> Result<&'a [u8]> {
        let (head, rest) =
            self.rest.split_at_checked(len).ok_or_else(|| malformed("it is cut off"))?;
        self.rest = rest;
        Ok(head)
    }

    /// The next `len` bytes, shared with the body instead of copied.
    pub(crate) fn share(&mut self, len: usize) -> Result<Bytes> {
        self.slice(len).map(|bytes| self.whole.slice_ref(bytes))
    }

    /// The rest of the body as the reason of a failure.
    pub(crate) fn reason(&mut self) -> Result<String> {
        let text = std::mem::take(&mut self.rest);
        if text.len() > MAX_REASON_BYTES {
            return Err(malformed("a reason that is too long"));
        }
        utf8(text)
    }

    /// The rest of the body as a [failure](failure_body).
    pub(crate) fn failure(&mut self) -> Result<(ErrorKind, String)> {
        Ok((failure_kind(self.u8()?)?, self.reason()?))
    }

    /// Fails if bytes are left: nothing may follow a message.
    pub(crate) fn end(self) -> Result<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(malformed("bytes after its end")) }
    }
}

/// The text in these bytes.
pub(crate) fn utf8(bytes: &[u8]) -> Result<String> {
    let text = std::str::from_utf8(bytes).map_err(|_| malformed("text that is not UTF-8"))?;
    Ok(text.to_owned())
}
