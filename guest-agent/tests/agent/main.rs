//! The agent as a program, against a stand-in for `cairn-blk` on a unix socket.

mod conversation;
mod freeze;
mod host;
