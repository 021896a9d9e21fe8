//! Opening a repository, in a directory or on peers.

use std::sync::{Arc, Mutex};

use super::leases::Leases;
use super::{ClusterPart, Durability, Inner, Repository, layout};
use crate::blobs::Blobs;
use crate::blobs::directory::DirectoryBlobs;
use crate::catalog::Catalog;
use crate::cluster::client::watcher::watch_members;
use crate::documents::{self, Documents, SqliteDocuments};
use crate::durable::reserve::Reserve;
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::net::identity::{Access, Role, Security};
use crate::tree::Trees;

/// The most memory for decoded tree nodes, over all clones of a handle.
const NODE_CACHE_BYTES: usize = 16 << 20;

/// Where the blobs are.
enum Place {
    Directory(Arc<DirectoryBlobs>),
    Cluster(ClusterPart),
}

impl Repository {
    /// Opens an existing repository in a directory of this host.
    pub fn open(url: &str) -> Result<Self> {
        Self::open_with(url, |blobs| blobs)
    }

    /// Opens a repository in a directory of this host, and creates it first if nothing is there.
    pub fn open_or_create(url: &str) -> Result<Self> {
        layout::create(&layout::directory_of(url)?)?;
        Self::open(url)
    }

    /// Opens a repository in a directory with a wrapper around its blobs, which counts, delays or
    /// fails calls.
    pub fn open_with(
        url: &str,
        wrap: impl FnOnce(Arc<dyn Blobs>) -> Arc<dyn Blobs>,
    ) -> Result<Self> {
        let path = layout::directory_of(url)?;
        layout::check(&path)?;
        // Before the databases are opened: without space they cannot be.
        Reserve::of(&path)?.release();
        let directory = Arc::new(DirectoryBlobs::open(&path)?);
        let blobs = wrap(Arc::clone(&directory) as Arc<dyn Blobs>);
        let documents = Arc::new(SqliteDocuments::open(&layout::catalog(&path))?);
        Ok(Self::new(blobs, documents, Place::Directory(directory)))
    }

    /// Opens a repository whose blobs are in a directory and whose catalog is elsewhere, for tests: the
    /// catalog's promises do not depend on the place of the blobs.
    #[doc(hidden)]
    pub fn with_documents(url: &str, documents: Arc<dyn Documents>) -> Result<Self> {
        let path = layout::directory_of(url)?;
        layout::check(&path)?;
        let directory = Arc::new(DirectoryBlobs::open(&path)?);
        let blobs = Arc::clone(&directory) as Arc<dyn Blobs>;
        Ok(Self::new(blobs, documents, Place::Directory(directory)))
    }

    /// Opens the repository of a cluster. `cairn://HOST:PORT` names its catalog, `etcd://HOST:PORT` an
    /// etcd that holds the catalog.
    pub fn connect(url: &str, security: &Security) -> Result<Self> {
        let address = cluster_address(url).ok_or_else(|| Error::BadUrl { url: url.into() })?;
        Self::of_cluster(documents::open(address, security)?, security)
    }

    /// The repository of the cluster whose documents these are.
    pub fn of_cluster(documents: Arc<dyn Documents>, security: &Security) -> Result<Self> {
        let (blobs, watcher) = watch_members(&documents, security)?;
        let cluster = ClusterPart { blobs: Arc::clone(&blobs), watcher };
        Ok(Self::new(blobs, documents, Place::Cluster(cluster)))
    }

    /// Opens an existing repository, in a directory or of a cluster.
    pub fn open_anywhere(url: &str, access: &Access<'_>) -> Result<Self> {
        match cluster_address(url) {
            Some(_) => Self::connect(url, &access.security(Role::Client)?),
            None => Self::open(url),
        }
    }

    /// Opens a repository, in a directory or of a cluster. Creates it in a directory if nothing is
    /// there.
    pub fn open_or_create_anywhere(url: &str, access: &Access<'_>) -> Result<Self> {
        match cluster_address(url) {
            Some(_) => Self::open_anywhere(url, access),
            None => Self::open_or_create(url),
        }
    }

    fn new(blobs: Arc<dyn Blobs>, documents: Arc<dyn Documents>, place: Place) -> Self {
        let (directory, cluster) = match place {
            Place::Directory(directory) => (Some(directory), None),
            Place::Cluster(cluster) => (None, Some(cluster)),
        };
        let trees = Arc::new(Trees::new(Arc::clone(&blobs), NODE_CACHE_BYTES));
        let catalog = Catalog::new(Arc::clone(&documents));
        let (known_since, leases) = (Mutex::default(), Leases::new(Arc::clone(&documents)));
        let inner =
            Inner { blobs, trees, catalog, documents, directory, cluster, known_since, leases };
        let inner = Arc::new(inner);
        Self { inner, policy: StoragePolicy::default(), durability: Durability::default() }
    }
}

/// The catalog's address in the URL of a cluster; `None` for another URL.
fn cluster_address(url: &str) -> Option<&str> {
    let address = match url.strip_prefix("cairn://") {
        Some(address) => address.trim_end_matches('/'),
        None => url.starts_with("etcd://").then_some(url)?,
    };
    (!address.is_empty()).then_some(address)
}
