//! A repository on many machines.
//!
//! | part | is |
//! |---|---|
//! | [`Redundancy`] | how a blob is kept safe |
//! | [`fragment`] | a blob in parts |
//! | [`placement`] | which peers hold the parts |
//! | [`peer`] | a process that holds them |
//! | [`wire`] | what is said to it |

pub mod fragment;
pub mod peer;
pub mod placement;
mod redundancy;
pub mod wire;

pub use redundancy::Redundancy;
