//! Tells hypervisors that the configuration space of the device has changed.
//!
//! A hypervisor may open a channel on which the device sends messages of its own
//! (`VHOST_USER_SET_BACKEND_REQ_FD`). A message says only that something has changed; the hypervisor
//! then reads the space. So a message that does not fit into the channel is dropped: the hypervisor
//! has not read the ones before it yet.
//!
//! The `vhost` crate (0.18) keeps the channel to itself and has no function for this message. So the
//! descriptor is taken from the hypervisor's message before the crate reads it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::ring_ownership::ConnectionId;
use crate::sys;

/// The number of the message that opens a channel.
const SET_BACKEND_REQ_FD: u32 = 21;

/// The number of the message that says that the configuration space has changed.
const CONFIG_CHANGE: u32 = 2;

/// The version of the protocol, in the flags of each message.
const PROTOCOL_VERSION: u32 = 1;

/// The length of a message's header: request, flags and size of the body.
const HEADER_BYTES: usize = 12;

/// The channels of the hypervisors that are connected.
#[derive(Default)]
pub(crate) struct ConfigChannels(Mutex<Channels>);

#[derive(Default)]
struct Channels {
    streams: HashMap<ConnectionId, UnixStream>,
    /// The connections to which a message was sent.
    notified: HashSet<ConnectionId>,
}

impl Channels {
    fn notify(&mut self, id: ConnectionId) {
        if let Some(stream) = self.streams.get(&id) {
            self.notified.insert(id);
            send(stream);
        }
    }
}

impl ConfigChannels {
    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next message of a connection, and keeps the channel if the message has one. The
    /// message stays in the socket.
    pub(crate) fn watch(&self, id: ConnectionId, connection: &UnixStream) {
        let mut header = [0; HEADER_BYTES];
        let Ok(HEADER_BYTES) = sys::peek(connection, &mut header) else { return };
        if header[..4] != SET_BACKEND_REQ_FD.to_ne_bytes() {
            return;
        }
        match sys::peek_descriptor(connection) {
            Ok(Some(channel)) => {
                let before = self.channels().streams.insert(id, channel.into());
                // Not while the channels are locked.
                drop(before);
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "cannot use the hypervisor's channel"),
        }
    }

    /// Forgets the channel of a connection that has ended.
    pub(crate) fn remove(&self, id: ConnectionId) {
        let mut channels = self.channels();
        channels.notified.remove(&id);
        let stream = channels.streams.remove(&id);
        drop(channels);
        drop(stream);
    }

    /// Tells a hypervisor that the space may have changed since it last read it.
    pub(crate) fn notify(&self, id: ConnectionId) {
        self.channels().notify(id);
    }

    /// Tells all hypervisors that the space has changed.
    pub(crate) fn notify_all(&self) {
        let mut channels = self.channels();
        let ids: Vec<_> = channels.streams.keys().copied().collect();
        ids.into_iter().for_each(|id| channels.notify(id));
    }

    /// Whether a message was sent on a connection. Then the hypervisor may read the space only to
    /// answer the message, and take over only what a device can change.
    pub(crate) fn was_notified(&self, id: ConnectionId) -> bool {
        self.channels().notified.contains(&id)
    }
}

fn send(channel: &UnixStream) {
    let words = [CONFIG_CHANGE, PROTOCOL_VERSION, 0];
    let message: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    match sys::send_at_once(channel, &message) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => tracing::warn!(%error, "cannot tell the hypervisor of a change of the disk"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::{ConfigChannels, HEADER_BYTES, SET_BACKEND_REQ_FD};
    use crate::guest::ring_ownership::ConnectionId;
    use crate::sys;

    #[test]
    fn a_hypervisor_that_reads_nothing_or_has_gone_holds_up_nobody() {
        let (channels, id) = (ConfigChannels::default(), ConnectionId(3));
        let (mut channel, own) = UnixStream::pair().unwrap();
        channels.channels().streams.insert(id, own);
        for _ in 0..10_000 {
            channels.notify(id);
        }
        let mut message = [0; HEADER_BYTES];
        channel.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        drop(channel);
        channels.notify_all();
        channels.remove(id);
        channels.notify(id);
    }

    #[test]
    fn only_the_message_that_opens_a_channel_gives_one_and_it_stays_in_the_socket() {
        let (channels, id) = (ConfigChannels::default(), ConnectionId(3));
        let (mut hypervisor, mut connection) = UnixStream::pair().unwrap();
        let mut message = [0; HEADER_BYTES];
        for request in [1, SET_BACKEND_REQ_FD] {
            message[..4].copy_from_slice(&request.to_ne_bytes());
            hypervisor.write_all(&message).unwrap();
            channels.watch(id, &connection);
            assert!(channels.channels().streams.is_empty(), "no descriptor came with it");
            connection.read_exact(&mut message).unwrap();
        }
        let (mut channel, theirs) = UnixStream::pair().unwrap();
        sys::tests::send_descriptor(&hypervisor, &message, &theirs);
        drop(theirs);
        channels.watch(id, &connection);
        channels.notify_all();
        channel.read_exact(&mut message).unwrap();
        connection.read_exact(&mut message).unwrap();
        assert_eq!(message[..4], SET_BACKEND_REQ_FD.to_ne_bytes());
    }
}
