//! A repository on many machines.
//!
//! | part | is |
//! |---|---|
//! | [`Redundancy`] | how a blob is kept safe |
//! | [`fragment`] | a blob in parts |
//! | [`placement`] | which peers hold the parts |

pub mod fragment;
pub mod placement;
mod redundancy;

pub use redundancy::Redundancy;
