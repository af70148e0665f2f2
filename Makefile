# The two commands of the README, and what developers run besides.
JOBS ?= $(shell nproc)
BACKEND ?= cpu

.PHONY: demo test report format install clean

demo:  ## build the command, generate a video with dense attention, SCOPE and SVG2, and compare them
	@tools/bootstrap.sh demo
	@cmake --preset demo >/dev/null
	@cmake --build build/demo -j $(JOBS) --target scope_command
	@tools/demo.sh build/demo/bin/scope out/demo

test:  ## build everything and run the tests
	@tools/bootstrap.sh test
	@cmake --preset release >/dev/null
	@cmake --build build/release -j $(JOBS)
	@ctest --test-dir build/release --output-on-failure -j $(JOBS)

report:  ## the paper's ablations by whole videos, into docs/video_report.md: BACKEND=cuda minutes, BACKEND=cpu hours (it says how many)
	@tools/bootstrap.sh test
	@cmake --preset $(if $(filter cuda,$(BACKEND)),cuda,release) >/dev/null
	@cmake --build build/$(if $(filter cuda,$(BACKEND)),cuda,release) -j $(JOBS) --target scope_command
	@tools/report.sh build/$(if $(filter cuda,$(BACKEND)),cuda,release)/bin/scope $(BACKEND)

format:
	@git ls-files '*.cpp' '*.h' '*.hpp' '*.c' '*.cu' '*.cuh' | xargs clang-format-14 -i

install: test
	@cmake --install build/release

clean:
	rm -rf build
