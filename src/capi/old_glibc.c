// Lets the wheel's libscope.so run from glibc 2.28 on, whichever newer one it was built with. There these functions have
// newer versions, for reasons that do not concern us: they moved into libc.so.6 (2.34), or lost a handler of errors (exp,
// log; 2.29). The linker leads calls of F to __wrap_F (--wrap; CMakeLists.txt reads the names here), which goes on to the
// old version.
#include <sys/stat.h>

// clang-format off
#define OLD_OF(name, version)                                          \
  __asm__(".section .text.old_" #name ",\"ax\",@progbits\n"            \
          ".symver old_" #name ", " #name "@GLIBC_" #version "\n"      \
          ".globl __wrap_" #name "\n"                                  \
          ".hidden __wrap_" #name "\n"                                 \
          ".type __wrap_" #name ", @function\n"                        \
          "__wrap_" #name ": endbr64\n"                                \
          "  jmp old_" #name "@PLT\n"                                  \
          ".text\n");
// clang-format on
#define OLD(name) OLD_OF(name, 2.2.5)

OLD(exp)
OLD(log)
// Of libstdc++.
OLD(__pthread_key_create)
OLD(pthread_create)
OLD(pthread_join)
OLD(pthread_once)
// Of CUDA's runtime.
OLD(dlclose)
OLD(dlerror)
OLD_OF(dlmopen, 2.3.4)
OLD(dlopen)
OLD(dlsym)
OLD(dlvsym)
OLD(pthread_condattr_setpshared)
OLD(pthread_detach)
OLD(pthread_getspecific)
OLD(pthread_key_create)
OLD(pthread_key_delete)
OLD(pthread_kill)
OLD(pthread_mutex_trylock)
OLD(pthread_mutexattr_destroy)
OLD(pthread_mutexattr_init)
OLD(pthread_mutexattr_setpshared)
OLD(pthread_mutexattr_settype)
OLD(pthread_rwlock_destroy)
OLD(pthread_rwlock_init)
OLD(pthread_rwlock_rdlock)
OLD(pthread_rwlock_timedrdlock)
OLD(pthread_rwlock_timedwrlock)
OLD(pthread_rwlock_tryrdlock)
OLD(pthread_rwlock_trywrlock)
OLD(pthread_rwlock_unlock)
OLD(pthread_rwlock_wrlock)
OLD(pthread_rwlockattr_destroy)
OLD(pthread_rwlockattr_init)
OLD(pthread_rwlockattr_setpshared)
OLD(pthread_setspecific)
OLD(pthread_spin_destroy)
OLD(pthread_spin_init)
OLD(pthread_spin_lock)
OLD(pthread_spin_trylock)
OLD(pthread_spin_unlock)
OLD(sem_destroy)
OLD(sem_init)
OLD(sem_post)
OLD(sem_timedwait)
OLD(sem_trywait)
OLD(sem_wait)
OLD(shm_open)
OLD(shm_unlink)

// Before 2.33 these were inline, over functions that are told which struct stat is meant: 1 on x86-64.
__asm__(
    ".symver old_xstat, __xstat@GLIBC_2.2.5\n.symver old_fxstat, __fxstat@GLIBC_2.2.5\n.symver old_lxstat, "
    "__lxstat@GLIBC_2.2.5");
int old_xstat(int version, const char* path, struct stat* out);
int old_fxstat(int version, int file, struct stat* out);
int old_lxstat(int version, const char* path, struct stat* out);

#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN int __wrap_stat(const char* path, struct stat* out) { return old_xstat(1, path, out); }
HIDDEN int __wrap_fstat(int file, struct stat* out) { return old_fxstat(1, file, out); }
HIDDEN int __wrap_lstat(const char* path, struct stat* out) { return old_lxstat(1, path, out); }

// libstdc++ asks whether a second thread was ever started (2.32). 0: there may be one.
HIDDEN char __libc_single_threaded;
