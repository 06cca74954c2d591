// Kernels take addresses and dynamic sizes in place of memrefs, all of them the same ones.
// RUN: gossamer-opt %s -p 'emit-gpu-entry' --split-input-file --verify-diagnostics | filecheck %s

// Memrefs but the last are only read. The dynamic dimensions are written down for the runtime.
// CHECK:       module attributes {kernel.words = {{\[}}[0 : i32], [], [0 : i32]{{\]}}}
// CHECK:       gpu.func @copy(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: !llvm.ptr {llvm.align = 16 : i64, llvm.noalias, llvm.readonly}, %[[T:[a-z0-9]*]]: i64,
// CHECK-SAME:    %{{[a-z0-9]*}}: !llvm.ptr {llvm.align = 16 : i64, llvm.noalias, llvm.readonly},
// CHECK-SAME:    %{{[a-z0-9]*}}: !llvm.ptr {llvm.align = 16 : i64, llvm.noalias}, %{{[a-z0-9]*}}: i64) kernel
// CHECK:         llvm.insertvalue %[[X]], %{{.*}}[1]
// CHECK:         llvm.insertvalue %[[T]], %{{.*}}[3, 0]
// CHECK:         %[[MEMREF:.*]] = builtin.unrealized_conversion_cast %{{.*}} : {{.*}} to memref<?x4xf32>
// CHECK:         memref.load %[[MEMREF]]
gpu.module @kernels {
  gpu.func @copy(%x: memref<?x4xf32>, %scale: memref<4xf32>, %out: memref<?xf32>) kernel {
    %i = gpu.thread_id x
    %c0 = arith.constant 0 : index
    %0 = memref.load %x[%i, %c0] : memref<?x4xf32>
    memref.store %0, %out[%i] : memref<?xf32>
    gpu.return
  }
}

// -----

// expected-error@unknown {{emit-gpu-entry needs a kernel, the module has none}}
module {
}
