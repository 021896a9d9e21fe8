# Builds, tests and shows Cairn. `make help` lists what there is.
#
# Everything that is fetched stays in .cache and in cargo's own cache: a second run of any target
# needs no network.

.DEFAULT_GOAL := build
.NOTPARALLEL:
.PHONY: help build setup packages build-packages kernel vsock-device test lint unit-test vm-test demo demo-cluster soak bench fuzz deny \
        clean distclean FORCE

CARGO     ?= cargo
CACHE     := $(CURDIR)/.cache
TARGET    := $(abspath $(or $(CARGO_TARGET_DIR),target))
TRIPLE    := x86_64-unknown-linux-gnu
AGENT     := $(TARGET)/$(TRIPLE)/agent/cairn-agent
VERIFIER  := $(TARGET)/$(TRIPLE)/agent/verifier
# The agent goes into every guest, whatever its size.
AGENT_MAX := 2000000
INITRAMFS := $(CACHE)/guest/initramfs
VSOCK     := $(CACHE)/tools/bin/vhost-device-vsock
VSOCK_VERSION := 0.3.0

say = @echo "==> $(1)"

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

build: build-packages $(AGENT) ## Build cairn, cairn-blk and the static cairn-agent, optimised (default)
	$(call say,building the workspace with optimisation)
	@$(CARGO) build --locked --release --workspace

$(AGENT): FORCE
	$(call say,building the static agent)
	@RUSTFLAGS='-C target-feature=+crt-static' \
	  $(CARGO) build --locked --profile agent --target $(TRIPLE) -p cairn-agent
	@size=$$(stat -c %s $@); [ $$size -le $(AGENT_MAX) ] || \
	  { echo "the agent has $$size bytes, more than $(AGENT_MAX)"; exit 1; }

$(VERIFIER): FORCE
	$(call say,building the static verifier)
	@RUSTFLAGS='-C target-feature=+crt-static' \
	  $(CARGO) build --locked --profile agent --target $(TRIPLE) -p verifier

setup: packages kernel vsock-device $(INITRAMFS) ## Obtain what the guests need, if it is not there
	$(call say,fetching crates)
	@$(CARGO) fetch --locked --quiet

packages:
	$(call say,checking Debian packages)
	@scripts/install-packages

build-packages:
	$(call say,checking Debian packages for the build)
	@scripts/install-packages build

kernel: packages
	$(call say,checking the guest kernel)
	@scripts/fetch-guest-kernel $(CACHE)/guest

vsock-device: $(VSOCK)

$(VSOCK): | packages
	$(call say,building the vsock device)
	@$(CARGO) install --quiet vhost-device-vsock --locked --version $(VSOCK_VERSION) \
	  --root $(CACHE)/tools

$(INITRAMFS): $(AGENT) $(VERIFIER) scripts/build-initramfs vmm-tests/guest/init | kernel
	$(call say,building the guest's initramfs)
	@scripts/build-initramfs $(CACHE)/guest/modules $@ $(AGENT) $(VERIFIER)

test: lint unit-test vm-test ## Run every check and every test, in guests too
	$(call say,all tests have passed)

lint: packages ## Check format, lints and documentation
	$(call say,checking the format)
	@$(CARGO) fmt --all --check
	$(call say,checking lints)
	@$(CARGO) clippy --locked --quiet --workspace --all-targets -- -D warnings
	$(call say,checking documentation)
	@RUSTDOCFLAGS='-D warnings' $(CARGO) doc --locked --quiet --workspace --no-deps \
	  --document-private-items

# The tests are built without optimisation: their assertions about lost requests and chunk states
# exist only then.
unit-test: packages ## Run the tests that need no guest
	$(call say,running the tests that need no guest)
	@$(CARGO) test --locked --quiet --workspace --exclude vmm-tests

vm-test: setup ## Run the tests that boot guests
	$(call say,building what the guests' disks are served with)
	@$(CARGO) build --locked --quiet --workspace
	$(call say,running the tests in guests)
	@CAIRN_BIN_DIR=$(TARGET)/debug CAIRN_CACHE_DIR=$(CACHE) \
	  $(CARGO) test --locked -p vmm-tests -- --test-threads=1

demo: setup build ## Show a checkpoint and a restart, from import to the checked result
	@CAIRN_BIN_DIR=$(TARGET)/release CAIRN_CACHE_DIR=$(CACHE) $(TARGET)/release/demo

demo-cluster: setup build ## The same on eight peers with TLS, of which four are destroyed
	@CAIRN_BIN_DIR=$(TARGET)/release CAIRN_CACHE_DIR=$(CACHE) $(TARGET)/release/demo cluster

# SOAK_SECONDS is the length of each part. All but the first run with assertions, as in `make test`.
soak: packages ## Write, checkpoint, kill, cut the power and verify for about an hour
	$(call say,running the stamped writer)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked --release -p cairn-backend --test stamped_writer -- --nocapture
	$(call say,killing the backend under a guest)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-backend --test kills -- --nocapture
	$(call say,cutting the power)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-backend --test power_cut -- --nocapture
	$(call say,simulating)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-backend --lib simulation -- --nocapture
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-store --lib simulation -- --nocapture
	$(call say,killing peers and the catalog of a cluster)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn --test cairn cluster_ -- --nocapture --test-threads=2

bench: packages ## Measure Cairn beside other programs, in about 20 minutes
	$(call say,measuring; the machine should have nothing else to do)
	@$(CARGO) run --locked --release -p cairn-bench -- all

# Every file there is a target. They share FUZZ_SECONDS equally.
FUZZ_TARGETS := $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))

fuzz: ## Feed all that is read back with anything for half an hour (needs a nightly toolchain)
	@command -v cargo-fuzz >/dev/null || PATH="$(CACHE)/tools/bin:$$PATH" command -v cargo-fuzz >/dev/null || \
	  { echo "==> installing cargo-fuzz"; \
	    $(CARGO) install --quiet cargo-fuzz --locked --root $(CACHE)/tools; }
	@count=$(words $(FUZZ_TARGETS)); \
	seconds=$$(( ($(or $(FUZZ_SECONDS),1800) + count - 1) / count )); \
	for target in $(FUZZ_TARGETS); do \
	  echo "==> fuzzing $$target for $$seconds seconds"; \
	  PATH="$(CACHE)/tools/bin:$$PATH" $(CARGO) +nightly fuzz run $$target -- \
	    -max_total_time=$$seconds -max_len=4096 || exit 1; \
	done

deny: ## Check licences, advisories and sources of all dependencies
	@command -v cargo-deny >/dev/null || PATH="$(CACHE)/tools/bin:$$PATH" command -v cargo-deny >/dev/null || \
	  { echo "==> installing cargo-deny"; \
	    $(CARGO) install --quiet cargo-deny --locked --root $(CACHE)/tools; }
	$(call say,checking dependencies)
	@PATH="$(CACHE)/tools/bin:$$PATH" $(CARGO) deny --workspace check

clean: ## Remove what was built
	@rm -f $(INITRAMFS)
	@$(CARGO) clean

distclean: clean ## Remove what was fetched, too
	@rm -rf $(CACHE)

FORCE:
