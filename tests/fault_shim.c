// Lets one file operation below a folder, or the start of a thread, fail, for tests: preloaded into the command, or compiled
// into a program.
//   SCOPE_FAULT_UNDER=FOLDER   whose files count
//   SCOPE_FAULT_AT=N           the N-th operation fails with EIO; 0: none
//   SCOPE_FAULT_RENAME=none    renameat2 has no flags, as on file systems without them
//   SCOPE_FAULT_THREAD=N       the N-th start of a thread fails
//   SCOPE_FAULT_COUNT=FILE     where the number of operations is written at the end
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC visibility push(default)
#define MOST_FILES 4096

char fault_under[PATH_MAX] = "";
atomic_long fault_at = 0, fault_seen = 0;
static atomic_long thread_starts = 0;
static long failing_start = 0;
static bool plain_renames = false;
static atomic_bool watched[MOST_FILES];

__attribute__((constructor)) static void read_environment(void) {
  const char* under = getenv("SCOPE_FAULT_UNDER");
  const char* at = getenv("SCOPE_FAULT_AT");
  if (under != NULL) snprintf(fault_under, sizeof fault_under, "%s", under);
  if (at != NULL) fault_at = atol(at);
  const char* start = getenv("SCOPE_FAULT_THREAD");
  if (start != NULL) failing_start = atol(start);
  plain_renames = getenv("SCOPE_FAULT_RENAME") != NULL;
}

__attribute__((destructor)) static void write_count(void) {
  const char* path = getenv("SCOPE_FAULT_COUNT");
  char text[32];
  if (path == NULL) return;
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  const int length = snprintf(text, sizeof text, "%ld\n", (long)fault_seen);
  syscall(SYS_write, fd, text, (size_t)length);
  syscall(SYS_close, fd);
}

// Whether a path lies below the folder; a relative one is taken to.
static bool counts(const char* path) {
  return fault_under[0] != '\0' && (path[0] != '/' || strncmp(path, fault_under, strlen(fault_under)) == 0);
}
static bool is_watched(int fd) { return fd >= 0 && fd < MOST_FILES && watched[fd]; }
static int watch(int fd, bool yes) {
  if (fd >= 0 && fd < MOST_FILES) watched[fd] = yes;
  return fd;
}
static bool fails(bool counted) {
  if (!counted || atomic_fetch_add(&fault_seen, 1) + 1 != fault_at) return false;
  errno = EIO;
  return true;
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                        \
  int name(const char* path, int flags, ...) {            \
    va_list rest;                                         \
    va_start(rest, flags);                                \
    const mode_t mode = va_arg(rest, mode_t);             \
    va_end(rest);                                         \
    const bool counted = counts(path);                    \
    if (fails(counted)) return -1;                        \
    return watch(REAL(name)(path, flags, mode), counted); \
  }
OPEN(open)
OPEN(open64)

FILE* fopen(const char* path, const char* mode) { return fails(counts(path)) ? NULL : REAL(fopen)(path, mode); }
FILE* fopen64(const char* path, const char* mode) { return fails(counts(path)) ? NULL : REAL(fopen64)(path, mode); }
DIR* opendir(const char* path) { return fails(counts(path)) ? NULL : REAL(opendir)(path); }
int mkdir(const char* path, mode_t mode) { return fails(counts(path)) ? -1 : REAL(mkdir)(path, mode); }
int link(const char* from, const char* to) { return fails(counts(from)) ? -1 : REAL(link)(from, to); }
int rename(const char* from, const char* to) { return fails(counts(from)) ? -1 : REAL(rename)(from, to); }
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  if (plain_renames && flags != 0) {
    errno = EINVAL;
    return -1;
  }
  return fails(counts(from)) ? -1 : REAL(renameat2)(from_folder, from, to_folder, to, flags);
}
ssize_t read(int fd, void* to, size_t bytes) { return fails(is_watched(fd)) ? -1 : REAL(read)(fd, to, bytes); }
ssize_t pread(int fd, void* to, size_t bytes, off_t at) {
  return fails(is_watched(fd)) ? -1 : REAL(pread)(fd, to, bytes, at);
}
ssize_t write(int fd, const void* from, size_t bytes) { return fails(is_watched(fd)) ? -1 : REAL(write)(fd, from, bytes); }
int fstat(int fd, struct stat* to) { return fails(is_watched(fd)) ? -1 : REAL(fstat)(fd, to); }
int fsync(int fd) { return fails(is_watched(fd)) ? -1 : REAL(fsync)(fd); }
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  if (atomic_fetch_add(&thread_starts, 1) + 1 == failing_start) return EAGAIN;
  return REAL(pthread_create)(thread, attributes, start, argument);
}
// The number is free afterwards even when closing fails.
int close(int fd) {
  const bool failed = fails(is_watched(fd));
  watch(fd, false);
  const int result = REAL(close)(fd);
  errno = failed ? EIO : errno;
  return failed ? -1 : result;
}
#pragma GCC visibility pop
