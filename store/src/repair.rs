//! The repair of everything that a cluster's names refer to.

use crate::cluster::repair::Report;
use crate::error::{Error, Result};
use crate::repository::Repository;

impl Repository {
    pub fn has_available(&self) -> Result<bool> {
        Ok(!self.catalog().available()?.is_empty())
    }
    pub fn repair(&self, rate: Option<u64>, progress: &dyn Fn(u64)) -> Result<Report> {
        self.repair_while(rate, &|| true, progress)
    }
    pub fn repair_while(
        &self,
        _: Option<u64>,
        _: &dyn Fn() -> bool,
        _: &dyn Fn(u64),
    ) -> Result<Report> {
        let _ = self.references(|_, _| ());
        Err(Error::BadArgument("soon".into()))
    }
}
