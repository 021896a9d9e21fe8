//! `supervise` runs the supervisor of a repository as a process of its own.

use cairn_store::Repository;
use cairn_store::maintenance::supervisor::Supervisor;
use cairn_store::net::identity::{Access, Role};
use serde_json::json;

use crate::args::{Style, SupervisorOptions};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{print, print_json};
use crate::service::{run, signals, start_log};

/// Supervises until a signal stops the process.
pub(crate) fn supervise(
    url: &str,
    access: &Access<'_>,
    options: &SupervisorOptions,
    style: Style,
) -> Outcome {
    let doing = || format!("supervising {url}");
    let repository = match url.starts_with("dir:") {
        true if options.is_for_cluster() => {
            let why =
                "a repository in a directory has no peers; omit --lost-after and --repair-rate";
            return Err(Failure::new(Exit::Usage, doing(), why));
        }
        true => {
            start_log();
            Repository::open(url)
        }
        false => {
            let security = access.security(Role::Supervisor).doing(doing)?;
            start_log();
            Repository::connect(url, &security)
        }
    };
    let repository = repository.doing(doing)?;
    let supervisor = Supervisor::start(repository, options.config()).doing(doing)?;
    let ended = run(Role::Supervisor, async {
        let stop = signals();
        match style.json {
            true => print_json(&json!({ "supervises": url }))?,
            false => print(&format!("supervises {url}\n"))?,
        }
        stop.await;
        Ok(())
    });
    // This lets another supervisor act at once.
    drop(supervisor);
    ended
}
