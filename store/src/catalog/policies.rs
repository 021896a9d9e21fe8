//! Retention policies, as documents of the catalog. No peer has a record of them: a rebuilt catalog
//! has none, and keeps all snapshots until they are set again.

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::documents::{POLICIES, image, image_key, policy_key};
use crate::clock::now;
use crate::documents::{Change, Query};
use crate::error::{Error, Result};
use crate::name::{ImageName, Scope};
use crate::retention::RetentionPolicy;

/// The policy of some images.
#[derive(Clone, Serialize, Deserialize)]
struct PolicyDocument {
    policy: RetentionPolicy,
    /// When it was set: seconds since 1970.
    set: u64,
}

/// A policy, and the images that it is set on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedPolicy {
    /// The images.
    pub scope: Scope,
    /// Their policy, unless a smaller scope has one.
    pub policy: RetentionPolicy,
    /// When it was set: seconds since 1970, UTC.
    pub set: u64,
}

/// The policy that applies to an image, and the versions of all documents that could hold it.
pub(crate) struct FoundPolicy {
    pub(crate) applied: Option<AppliedPolicy>,
    pub(crate) versions: Vec<(String, u64)>,
}

impl Catalog {
    /// Sets the policy of these images. It replaces the one that they have, as a whole. A single
    /// image must exist; a folder may be empty.
    pub fn set_policy(&self, scope: &Scope, policy: &RetentionPolicy) -> Result<()> {
        policy.check()?;
        let existing = match scope {
            Scope::Image(name) => Some((name, Query::Key(image_key(name)))),
            Scope::Folder(_) | Scope::All => None,
        };
        let queries: Vec<Query> = existing.iter().map(|(_, query)| query.clone()).collect();
        let document = PolicyDocument { policy: policy.clone(), set: now() };
        self.change(&queries, |view| {
            existing.as_ref().map(|(name, _)| image(view, name)).transpose()?;
            Ok((Change::default().put(policy_key(scope), &document), ()))
        })
    }

    /// Removes the policy that is set on exactly this scope.
    pub fn remove_policy(&self, scope: &Scope) -> Result<()> {
        let key = policy_key(scope);
        self.change(&[Query::key(&key)], |view| {
            if view.version(&key) == 0 {
                return Err(Error::NoPolicy { scope: scope.to_string() });
            }
            Ok((Change::default().remove(Query::key(&key)), ()))
        })
    }

    /// All policies that are set, by the names of their scopes.
    pub fn policies(&self) -> Result<Vec<AppliedPolicy>> {
        let view = self.read(&[Query::prefix(POLICIES)])?;
        let all = view.under::<PolicyDocument>(POLICIES)?.into_iter();
        all.map(|(scope, document)| Ok(applied(scope.parse()?, document))).collect()
    }

    /// The policy that applies to an image: that of the smallest scope that has one.
    pub fn policy_of(&self, image: &ImageName) -> Result<Option<AppliedPolicy>> {
        Ok(self.find_policy(image)?.applied)
    }

    /// The policy that an image in these would have: theirs, or that of the smallest scope around them.
    pub fn policy_of_scope(&self, scope: &Scope) -> Result<Option<AppliedPolicy>> {
        let scopes = match scope {
            Scope::All => vec![Scope::All],
            Scope::Image(image) => Scope::all_of(image),
            Scope::Folder(folder) => {
                let mut scopes = Scope::all_of(folder);
                scopes[0] = scope.clone();
                scopes
            }
        };
        Ok(self.find_policy_in(scopes)?.applied)
    }

    pub(crate) fn find_policy(&self, image: &ImageName) -> Result<FoundPolicy> {
        self.find_policy_in(Scope::all_of(image))
    }

    /// Looks for a policy in these scopes, the smallest first.
    fn find_policy_in(&self, scopes: Vec<Scope>) -> Result<FoundPolicy> {
        let queries: Vec<Query> = scopes.iter().map(policy_key).map(Query::Key).collect();
        let view = self.read(&queries)?;
        let mut found = FoundPolicy { applied: None, versions: Vec::new() };
        for scope in scopes {
            let key = policy_key(&scope);
            found.versions.push((key.clone(), view.version(&key)));
            if found.applied.is_none()
                && let Some(document) = view.get(&key)?
            {
                found.applied = Some(applied(scope, document));
            }
        }
        Ok(found)
    }
}

fn applied(scope: Scope, PolicyDocument { policy, set }: PolicyDocument) -> AppliedPolicy {
    AppliedPolicy { scope, policy, set }
}
