# The two commands of the README, and what developers run besides.
JOBS ?= $(shell nproc)

.PHONY: demo test format install clean

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

format:
	@git ls-files '*.cpp' '*.h' '*.hpp' '*.c' '*.cu' '*.cuh' | xargs clang-format-14 -i

install: test
	@cmake --install build/release

clean:
	rm -rf build
