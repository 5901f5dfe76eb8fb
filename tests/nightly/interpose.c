/* Calls a hook before each change of the disk that the process asks the C library for.
 *
 * Preloaded into the process that forks.py starts: Python, Rust (safetensors) and C++ (torch) all pass here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

typedef int (*hook_t)(const char *what, int fd, const char *path, const void *bytes, long count);
static hook_t hook;
static __thread int inside; /* the hook's own changes are not watched */

void set_hook(hook_t wanted) { hook = wanted; }

/* What the hook returns. */
enum { DONE, LEFT_OUT, DISK_FULL };
static int before(const char *what, int fd, const char *path, const void *bytes, long count) {
    if (!hook || inside) return DONE;
    int saved = errno;
    inside = 1;
    int verdict = hook(what, fd, path, bytes, count);
    inside = 0;
    errno = verdict == DISK_FULL ? ENOSPC : saved;
    return verdict;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FORWARD(type, name, parameters, arguments, ...) \
    type name parameters { \
        int verdict = before(__VA_ARGS__); \
        return verdict == DISK_FULL ? -1 : verdict == LEFT_OUT ? 0 : NEXT(name) arguments; }
#define OPENS(name, parameters, arguments, fd) \
    int name parameters { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) before("open", fd, path, 0, 0); \
        return NEXT(name) arguments; }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)
OPENS(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)
FORWARD(ssize_t, write, (int fd, const void *bytes, size_t count), (fd, bytes, count), "write", fd, 0, bytes, count)
FORWARD(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), "write", fd, 0, 0, 0)
FORWARD(ssize_t, sendfile, (int to, int from, off_t *at, size_t count), (to, from, at, count), "write", to, 0, 0, 0)
FORWARD(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t count), (to, from, at, count), "write", to, 0, 0, 0)
FORWARD(ssize_t, copy_file_range, (int from, off64_t *in, int to, off64_t *out, size_t count, unsigned flags),
        (from, in, to, out, count, flags), "write", to, 0, 0, 0)
FORWARD(int, ftruncate, (int fd, off_t size), (fd, size), "truncate", fd, 0, 0, 0)
FORWARD(int, ftruncate64, (int fd, off64_t size), (fd, size), "truncate", fd, 0, 0, 0)
FORWARD(int, fsync, (int fd), (fd), "fsync", fd, 0, 0, 0)
FORWARD(int, rename, (const char *from, const char *to), (from, to), "rename", AT_FDCWD, to, 0, 0)
FORWARD(int, renameat, (int old, const char *from, int fd, const char *to), (old, from, fd, to), "rename", fd, to, 0, 0)
FORWARD(int, unlink, (const char *path), (path), "unlink", AT_FDCWD, path, 0, 0)
FORWARD(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags), "unlink", fd, path, 0, 0)
FORWARD(int, rmdir, (const char *path), (path), "rmdir", AT_FDCWD, path, 0, 0)
FORWARD(int, mkdir, (const char *path, mode_t mode), (path, mode), "mkdir", AT_FDCWD, path, 0, 0)
