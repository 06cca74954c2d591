// What becomes of math functions, and of shared memory whose size the launch gives.
// RUN: gossamer-opt %s -p 'lower-to-nvvm' | filecheck %s

// CHECK:       llvm.mlir.global external @[[SHARED:.*]]() {addr_space = 3 : i32, alignment = 16 : i64} : !llvm.array<0 x i8>
// CHECK-LABEL: llvm.func @functions(
// CHECK-SAME:    nvvm.kernel
// CHECK-DAG:     llvm.mlir.addressof @[[SHARED]]
// CHECK-DAG:     llvm.intr.sqrt
// CHECK-DAG:     llvm.intr.roundeven
// CHECK-DAG:     llvm.intr.minnum
// CHECK-DAG:     llvm.call @__nv_logf
gpu.module @kernels {
  gpu.func @functions(%x: !llvm.ptr, %y: f32) kernel {
    %0 = math.sqrt %y : f32
    %1 = math.roundeven %0 : f32
    %2 = arith.minnumf %1, %y : f32
    %3 = math.log %2 : f32
    %shared = gpu.dynamic_shared_memory : memref<?xi8, #gpu.address_space<workgroup>>
    %c16 = arith.constant 16 : index
    %view = memref.view %shared[%c16][] : memref<?xi8, #gpu.address_space<workgroup>> to memref<8xf32, #gpu.address_space<workgroup>>
    %i = gpu.thread_id x
    memref.store %3, %view[%i] : memref<8xf32, #gpu.address_space<workgroup>>
    gpu.return
  }
}
