/* Runs machine code for another CPU on the memory of the process that started this program, under user-mode emulation.

   Requests come on stdin, answers go to stdout (see emulator.py). All numbers are 64 bits wide.

     in   'L' length path   load a library                     out  'D' its number, or -1
     in   'C' number words  call `entry` of it with an address  out  'D' 0
     out  'R' address       wants memory                        in   length, and as many bytes (whole pages; 0 if there is none)
     out  'W' address length bytes                              has changed memory

   A page of the other process appears here, at the same address, as soon as code touches it. What code writes to it goes back
   byte by byte when the call is over, and the pages disappear. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 1 << 19, SLOTS = 2 * PAGES, LIBRARIES = 1 << 14 };

static char *pages[PAGES], *before[PAGES]; /* those that are here, and what they were where code has written to them */
static int count, numbers[SLOTS], slots[PAGES]; /* a table of the numbers of pages, from 1 on, and where each is in it */
static volatile int busy;
static void (*entries[LIBRARIES])(void *);

static void out(const void *bytes, size_t size) {
    for (const char *p = bytes; size;) {
        ssize_t done = write(1, p, size);
        if (done <= 0) _exit(1);
        p += done, size -= done;
    }
}

static void in(void *bytes, size_t size) {
    for (char *p = bytes; size;) {
        ssize_t done = read(0, p, size);
        if (done <= 0) _exit(0);
        p += done, size -= done;
    }
}

static int64_t number(void) {
    int64_t value;
    in(&value, sizeof value);
    return value;
}

static void say(char what, int64_t value) {
    out(&what, 1);
    out(&value, sizeof value);
}

/* Where a page is in the table, or would be. */
static int slot_of(char *page) {
    int at = (uintptr_t)page / PAGE % SLOTS;
    while (numbers[at] && pages[numbers[at] - 1] != page) at = (at + 1) % SLOTS;
    return at;
}

static int find(char *page) { return numbers[slot_of(page)] - 1; }

static void die(const char *why, void *at) {
    fprintf(stderr, "%s at %p\n", why, at);
    _exit(1);
}

/* A page that is not here is asked for. One that is may be read until it is written to. */
static void on_fault(int signal, siginfo_t *info, void *context) {
    char *page = (char *)((uintptr_t)info->si_addr & -(uintptr_t)PAGE);
    while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) usleep(10);
    int known = find(page);
    if (known < 0) {
        say('R', (int64_t)page);
        int64_t length = number();
        if (!length) die("the kernel reads or writes memory that is not there,", info->si_addr);
        for (char *next = page; next < page + length; next += PAGE) {
            static char given[PAGE];
            in(given, PAGE);
            if (find(next) >= 0) continue;
            /* filled elsewhere: other threads must not see a page before its contents */
            char *filled = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memcpy(filled, given, PAGE);
            mprotect(filled, PAGE, PROT_READ);
            void *here = mmap(next, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (here != next || count == PAGES) die("the emulator needs an address that it uses itself,", next);
            if (mremap(filled, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, next) != next) die("no page moves", next);
            pages[count] = next;
            slots[count] = slot_of(next);
            numbers[slots[count]] = count + 1;
            count++;
        }
    } else if (!before[known]) { /* or another thread has been here first */
        before[known] = malloc(PAGE);
        memcpy(before[known], page, PAGE);
        mprotect(page, PAGE, PROT_READ | PROT_WRITE);
    }
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

static void give_back(void) {
    for (int i = 0; i < count; i++) {
        for (int low = 0, high; before[i] && low < PAGE; low = high + 1) {
            for (high = low; high < PAGE && pages[i][high] != before[i][high];) high++;
            if (high > low) {
                int64_t length = high - low;
                say('W', (int64_t)(pages[i] + low));
                out(&length, sizeof length);
                out(pages[i] + low, length);
            }
        }
        free(before[i]);
        before[i] = NULL;
        munmap(pages[i], PAGE);
    }
    for (int i = 0; i < count; i++) numbers[slots[i]] = 0;
    count = 0;
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    for (int64_t libraries = 0;;) {
        char what;
        in(&what, 1);
        if (what == 'L') {
            char path[4096] = {0};
            in(path, number());
            void *library = dlopen(path, RTLD_NOW);
            if (!library) fprintf(stderr, "%s\n", dlerror());
            entries[libraries] = library ? dlsym(library, "entry") : NULL;
            say('D', entries[libraries] ? libraries++ : -1);
        } else {
            int64_t which = number();
            entries[which]((void *)number());
            give_back();
            say('D', 0);
        }
    }
}
