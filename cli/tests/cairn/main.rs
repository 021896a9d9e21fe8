//! The real program, run as an operator runs it.

mod catalog;
mod control;
mod files;
mod images;
mod serve;
mod support;
