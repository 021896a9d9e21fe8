//! The real program, run as an operator runs it.

mod catalog;
mod cluster;
mod control;
mod files;
mod images;
mod lab;
mod repair;
mod serve;
mod support;
