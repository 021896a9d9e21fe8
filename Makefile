# Builds, tests and demonstrates Cairn. `make help` lists the targets.
#
# All downloads stay in .cache and in cargo's own cache: a second run of a target needs no network.

.DEFAULT_GOAL := build
.NOTPARALLEL:
.PHONY: help build install uninstall setup packages build-packages bench-packages kernel vsock-device test lint unit-test \
        install-test vm-test demo demo-cluster soak bench fuzz deny clean distclean FORCE

CARGO     ?= cargo
CACHE     := $(CURDIR)/.cache
TARGET    := $(abspath $(or $(CARGO_TARGET_DIR),target))
TRIPLE    := x86_64-unknown-linux-gnu
AGENT     := $(TARGET)/$(TRIPLE)/agent/cairn-agent
VERIFIER  := $(TARGET)/$(TRIPLE)/agent/verifier
# The agent is copied into every guest, so its size is limited.
AGENT_MAX := 2000000
# Manual pages and completions.
DOCS      := $(TARGET)/docs
INITRAMFS := $(CACHE)/guest/initramfs
VSOCK     := $(CACHE)/tools/bin/vhost-device-vsock
VSOCK_VERSION := 0.3.0

say = @echo "==> $(1)"

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

build: build-packages $(AGENT) ## Build cairn, cairn-blk, the static cairn-agent, manual pages and completions (default)
	$(call say,building the workspace with optimisation)
	@$(CARGO) build --locked --release --workspace
	$(call say,generating manual pages and completions)
	@$(TARGET)/release/docgen $(DOCS)

# Nothing is built here: the user who may install need not be the one who builds.
install: ## Install what `make build` has built below PREFIX (/usr/local); DESTDIR is put before each path
	@scripts/install $(TARGET)/release $(AGENT) $(DOCS)

uninstall: ## Remove what `make install` has installed
	@scripts/install --remove $(TARGET)/release $(AGENT) $(DOCS)

$(AGENT): FORCE
	$(call say,building the static agent)
	@RUSTFLAGS='-C target-feature=+crt-static' \
	  $(CARGO) build --locked --profile agent --target $(TRIPLE) -p cairn-agent
	@size=$$(stat -c %s $@); [ $$size -le $(AGENT_MAX) ] || \
	  { echo "the agent has $$size bytes; the limit is $(AGENT_MAX)"; exit 1; }

$(VERIFIER): FORCE
	$(call say,building the static verifier)
	@RUSTFLAGS='-C target-feature=+crt-static' \
	  $(CARGO) build --locked --profile agent --target $(TRIPLE) -p verifier

setup: packages kernel vsock-device $(INITRAMFS) ## Download and build what the test guests need, unless present
	$(call say,fetching crates)
	@$(CARGO) fetch --locked --quiet

packages:
	$(call say,checking Debian packages)
	@scripts/install-packages

build-packages:
	$(call say,checking Debian packages for the build)
	@scripts/install-packages build

bench-packages: packages
	$(call say,checking Debian packages for the benchmark)
	@scripts/install-packages bench

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

test: lint unit-test install-test vm-test ## Run all checks and all tests, including those in guests
	$(call say,all tests passed)

lint: packages ## Check formatting, lints and documentation
	$(call say,checking formatting)
	@$(CARGO) fmt --all --check
	$(call say,checking that modules form no cycles)
	@scripts/check-module-cycles */src
	$(call say,checking lints)
	@$(CARGO) clippy --locked --quiet --workspace --all-targets -- -D warnings
	$(call say,checking documentation)
	@RUSTDOCFLAGS='-D warnings' $(CARGO) doc --locked --quiet --workspace --no-deps \
	  --document-private-items

# Tests run without optimisation, because debug assertions check for lost requests and illegal chunk
# states.
unit-test: packages ## Run the tests that need no guest
	$(call say,running the tests that need no guest)
	@$(CARGO) test --locked --quiet --workspace --exclude vmm-tests

install-test: packages ## Install into temporary directories, check the files, and remove them
	$(call say,building the programs to install)
	@$(CARGO) build --locked --quiet --workspace
	@$(TARGET)/debug/docgen $(TARGET)/debug/docs
	$(call say,testing the installation)
	@scripts/test-install $(TARGET)/debug $(TARGET)/debug/cairn-agent $(TARGET)/debug/docs

vm-test: setup ## Run the tests that boot guests
	$(call say,building the programs for the guests' disks)
	@$(CARGO) build --locked --quiet --workspace
	$(call say,running the tests in guests)
	@CAIRN_BIN_DIR=$(TARGET)/debug CAIRN_CACHE_DIR=$(CACHE) \
	  $(CARGO) test --locked -p vmm-tests -- --test-threads=1

demo: setup build ## Demonstrate a checkpoint and a restart; every step is checked
	@CAIRN_BIN_DIR=$(TARGET)/release CAIRN_CACHE_DIR=$(CACHE) $(TARGET)/release/demo

demo-cluster: setup build ## The same demo on eight peers with TLS, four of which are destroyed
	@CAIRN_BIN_DIR=$(TARGET)/release CAIRN_CACHE_DIR=$(CACHE) $(TARGET)/release/demo cluster

# SOAK_SECONDS is the duration of each part. All parts but the stamped writer and the scan of many
# blobs run with debug assertions, as `make test` does.
soak: packages ## Run the randomised tests (writes, kills, power cuts, attacks, simulation) for about an hour
	$(call say,running the stamped writer)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked --release -p cairn-backend --test stamped_writer -- --nocapture
	$(call say,killing the backend under a guest)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-backend --test kills -- --nocapture
	$(call say,cutting the power)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-backend --test power_cut -- --nocapture
	$(call say,attacking a disk)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-backend --test hostile_soak -- --nocapture
	$(call say,simulating)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-backend --lib simulation -- --nocapture
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-store --lib simulation -- --nocapture
	$(call say,scanning ten million blobs)
	@CAIRN_SCALE_BLOBS=$(or $(SCALE_BLOBS),10000000) \
	  $(CARGO) test --locked --release -p cairn-store --test repair_scale -- --nocapture
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-store --lib index_tests -- --nocapture
	$(call say,living random lives of a repository)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn-store --lib life::a_random_life -- --nocapture
	$(call say,killing peers and the catalog of a cluster)
	@CAIRN_SOAK_SECONDS=$(or $(SOAK_SECONDS),600) \
	  $(CARGO) test --locked -p cairn --test cairn cluster_ -- --nocapture --test-threads=2

bench: bench-packages ## Compare Cairn with other programs, in about half an hour
	$(call say,measuring; the machine should be idle)
	@$(CARGO) run --locked --release -p cairn-bench -- all

# Each file in fuzz_targets is a target. The targets share FUZZ_SECONDS equally.
FUZZ_TARGETS := $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))

fuzz: ## Fuzz all parsers for half an hour (needs a nightly toolchain)
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

deny: ## Check licences, advisories and sources of the dependencies
	@command -v cargo-deny >/dev/null || PATH="$(CACHE)/tools/bin:$$PATH" command -v cargo-deny >/dev/null || \
	  { echo "==> installing cargo-deny"; \
	    $(CARGO) install --quiet cargo-deny --locked --root $(CACHE)/tools; }
	$(call say,checking dependencies)
	@PATH="$(CACHE)/tools/bin:$$PATH" $(CARGO) deny --workspace check

clean: ## Remove build results
	@rm -f $(INITRAMFS)
	@$(CARGO) clean

distclean: clean ## Remove build results and downloads
	@rm -rf $(CACHE)

FORCE:
